"""Placement of a process: its device, the precision of weights and arithmetic, its threads."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import torch
from transformers.utils import logging as transformers_logging

from draftsmith.drafters.config import DTYPES as NAMES
from draftsmith.drafters.config import TARGET_DTYPES
from draftsmith.drafters.target.sharded import load_spread
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError

# Without "auto", which each use decides for itself.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES if name != "auto"}


class Placement(NamedTuple):
    """Device and precision of a training process, one of `world_size`."""

    device: torch.device
    bf16: bool  # bfloat16 arithmetic over float32 draft weights
    rank: int
    world_size: int

    @property
    def target_dtype(self) -> torch.dtype:
        """Autocast does the rest on a CPU, where the float32 target stays the one that evaluation
        uses."""
        return torch.bfloat16 if self.bf16 and self.device.type == "cuda" else torch.float32


def placement_of(dtype: str) -> Placement:
    """Placement given by the machine and by torchrun's environment. `dtype` is that of the
    arithmetic; "auto" is bfloat16 where it is fast."""
    device = device_of()
    bf16 = fast_at_bf16(device) if dtype == "auto" else DTYPES[dtype] == torch.bfloat16
    return Placement(
        device, bf16, int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    )


def device_of(name: str | None = None) -> torch.device:
    """Device of that name; without a name, or with "auto", the CUDA device of this process, else
    the CPU. Raises `UserError`."""
    # A name such as "cuda:7" must not crash where CUDA is hidden.
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None or name == "auto":
        # Each process of a launcher has a device of its own.
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}" if num_devices else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(
            f"device is {name!r}, which torch does not know; give cpu, cuda or cuda:N"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= num_devices:
        seen = f"{num_devices or 'no'} CUDA device{'s' if num_devices > 1 else ''}"
        raise UserError(f"device is {name!r} but torch sees {seen} here; give cpu or leave it out")
    return device


def weight_dtype(name: str, device: torch.device) -> torch.dtype | Literal["auto"]:
    """Precision of a target's weights. "auto" is the checkpoint's own, but float32 on a CPU, where
    half precision is slower for few rows and greedy choices depend more on the other rows of a
    batch. int8 is that of linear layers alone. Raises `UserError`."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in TARGET_DTYPES:
        raise UserError(f"dtype is {name!r}; it must be one of {', '.join(TARGET_DTYPES)}")
    return torch.int8 if name == "int8" else DTYPES[name]


def load_target(
    path: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    max_length: int | None = None,
    shares: int = 1,
    offload: str | None = None,
    trust_remote_code: bool,
) -> Target:
    """Target on `device` for texts of `max_length` tokens, in `dtype`, a name as `weight_dtype`
    reads it; one copy of it by `shares` neighbouring processes, all of which make every pass;
    `offload` as `load_model` has it. Raises `UserError`."""
    # Commands show one progress line, their own.
    transformers_logging.disable_progress_bar()
    there = device_of(device)
    weights = weight_dtype(dtype, there) if isinstance(dtype, str) else dtype
    if offload == "cpu" and there.type == "cpu":
        raise UserError(
            "target_offload is 'cpu' and the target runs there, so its weights would stay where "
            "they are; give disk, or leave it out"
        )
    if shares > 1:
        model = load_spread(
            path,
            dtype=weights,
            device=there,
            shares=shares,
            trust_remote_code=trust_remote_code,
        )
        return Target(model, path, max_length=max_length, trust_remote_code=trust_remote_code)
    return Target.load(
        path,
        dtype=weights,
        device=there,
        offload=offload,
        max_length=max_length,
        trust_remote_code=trust_remote_code,
    )


def fast_at_bf16(device: torch.device) -> bool:
    """True where bfloat16 arithmetic is known to pay: on no other device than CUDA and CPUs.
    Without instructions for it (AVX512-BF16, AMX) a CPU is slower at it than at float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    if device.type != "cpu":
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def default_threads() -> int:
    """All cores but one. HTTP and clients need it, and OpenMP threads that wait for a core they
    share are ruinous: ten times slower was measured with 2 threads on 2 busy cores."""
    return min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) - 1))
