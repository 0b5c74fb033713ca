"""Placement of a process: its device, the precision of weights and arithmetic, its threads."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from draftsmith.drafters.config import DTYPES as NAMES
from draftsmith.drafters.quirks.recurrent import keeps_states
from draftsmith.drafters.target.load import build_model, load_config, own_dtype
from draftsmith.drafters.target.probe import check_weights
from draftsmith.drafters.target.quantised import quantisation
from draftsmith.drafters.target.sharded import load_spread
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.host_memory import affordable_copies, host_bytes
from draftsmith.kernels.measured import CHOICES, Choices
from draftsmith.kernels.products.fast_types import Use, name_of, speed_of
from draftsmith.kernels.products.narrow_products import NARROW
from draftsmith.progress import awaited, say

# Without "auto", which each use decides for itself.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES if name != "auto"}
# Share of a model's weights in linear layers and embeddings above which a server lays them out.
IN_LAYERS = 0.9


class Placement(NamedTuple):
    """Device and precision of a training process, one of `world_size`."""

    device: torch.device
    bf16: bool  # bfloat16 arithmetic over float32 draft weights
    rank: int
    world_size: int

    @property
    def target_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32


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


# What multiplies, by its use.
PRODUCTS = {"laid out": "a server", "plain": "torch", "step": "training"}


def weight_dtype(
    name: str,
    device: torch.device,
    path: str | Path,
    *,
    use: Use = "laid out",
    trust_remote_code: bool,
    choices: Choices = CHOICES,
) -> torch.dtype | Literal["auto"]:
    """Precision of the weights of the target at `path`, as `use` multiplies them. "auto" is the
    checkpoint's own, on a CPU wherever it is fast at that. Raises `UserError`."""
    if name == "auto":
        if device.type != "cpu":
            return "auto"
        try:
            config = load_config(path, trust_remote_code=trust_remote_code)
        except UserError:
            return torch.float32  # loading has the sentence
        return _fast_dtype(config, use, choices)
    if name not in NAMES:
        raise UserError(f"dtype is {name!r}; it must be one of {', '.join(NAMES)}")
    return DTYPES[name]


def _fast_dtype(config: PreTrainedConfig, use: Use, choices: Choices) -> torch.dtype:
    """The type of the checkpoint where products in it are faster here than in float32, or its
    weights as float32 do not fit; else float32, which has the same weights, to the bit."""
    own = own_dtype(config)
    if own not in NARROW or quantisation(config):
        return torch.float32
    num_weights, in_layers = weights_of(config)
    num_bytes = num_weights * own.itemsize
    if use == "laid out" and not (
        in_layers > IN_LAYERS and not keeps_states(config) and affordable_copies(num_bytes)
    ):
        use = "plain"
    speed, name = speed_of(own, use, choices), name_of(own)
    # Commands of one target differ in their products, and so in what is the fastest.
    here = f"here (products of {PRODUCTS[use]})"
    if speed.is_faster:
        _tell(f"dtype {name}: the checkpoint's, {speed.times:.1f} times as fast as float32 {here}")
        return own
    if num_weights * torch.float32.itemsize > host_bytes():
        _tell(f"dtype {name}: the checkpoint's, whose weights do not fit in memory as float32")
        return own
    why = f"has {speed.times:.2f} of its speed {here}" if speed.times else "was not timed here"
    rounded = torch.bfloat16 if own == torch.float16 else own
    other = speed_of(rounded, use, choices)
    if rounded != own and other.is_faster:
        why += f"; --dtype bfloat16 rounds the weights, {other.times:.1f} times as fast"
    _tell(f"dtype float32: the checkpoint's {name} {why}")
    return torch.float32


@cache
def _tell(line: str) -> None:
    """Says once what was chosen, by the first process of a launcher."""
    if os.environ.get("RANK", "0") == "0":
        say(line)


def weights_of(config: PreTrainedConfig) -> tuple[int, float]:
    """Number of a model's weights, and the share of them in linear layers and embeddings; (0, 0.0)
    for code of its own."""
    try:
        with torch.device("meta"):
            model = build_model(config, trust_remote_code=False)
    except Exception:  # `load_model` fails alike, with a sentence
        return 0, 0.0
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    known = {part.weight for part in model.modules() if type(part) in kinds}
    whole = sum(own.numel() for own in model.parameters())
    return whole, sum(own.numel() for own in known) / max(1, whole)


def load_target(
    path: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    max_length: int | None = None,
    shares: int = 1,
    offload: str | None = None,
    use: Use = "laid out",
    trust_remote_code: bool,
) -> Target:
    """Target on `device` for texts of `max_length` tokens, in `dtype`, a name as `weight_dtype`
    reads it for `use`; one copy of it by `shares` neighbouring processes, all of which make every
    pass; `offload` as `load_model` has it. Raises `UserError`."""
    # Commands show one progress line, their own.
    transformers_logging.disable_progress_bar()
    there = device_of(device)
    if offload == "cpu" and there.type == "cpu":
        raise UserError(
            "target_offload is 'cpu' and the target runs there, so its weights would stay where "
            "they are; give disk, or leave it out"
        )
    trust, weights = trust_remote_code, dtype
    with awaited(f"loading {path}", shows=os.environ.get("RANK", "0") == "0"):
        if isinstance(dtype, str):
            weights = weight_dtype(dtype, there, path, use=use, trust_remote_code=trust)
        if shares > 1:
            model = load_spread(
                path, dtype=weights, device=there, shares=shares, trust_remote_code=trust
            )
            return Target(model, path, max_length=max_length, trust_remote_code=trust)
        target = Target.load(
            path,
            dtype=weights,
            device=there,
            offload=offload,
            max_length=max_length,
            trust_remote_code=trust,
        )
        check_weights(target.model, path)
        return target


def fast_at_bf16(device: torch.device, choices: Choices = CHOICES) -> bool:
    """True where a training step's products in bfloat16 pay: measured on a CPU, and known of no
    other device than CUDA's."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return device.type == "cpu" and speed_of(torch.bfloat16, "step", choices).is_faster
