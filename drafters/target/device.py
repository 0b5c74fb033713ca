"""Where and in which precision the target runs, from the words of the options."""

from __future__ import annotations

import os

import torch
from transformers.utils import logging as transformers_logging

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(name: str) -> torch.device:
    if name == "auto":
        # Each process of a launcher has a device of its own.
        return (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device {name!r} is unknown; give auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {name!r} is not there ({torch.cuda.device_count()} CUDA devices); give "
            "--device cpu"
        )
    return device


def load_target(path: str, *, dtype: str, device: str, trust_remote_code: bool) -> Target:
    """`auto` is the checkpoint's own precision, but float32 on a CPU, where half precision is slow
    or inexact."""
    # Commands show one progress line, their own.
    transformers_logging.disable_progress_bar()
    place = device_of(device)
    auto = torch.float32 if place.type == "cpu" else "auto"
    return Target.load(
        path, dtype=DTYPES.get(dtype, auto), device=place, trust_remote_code=trust_remote_code
    )
