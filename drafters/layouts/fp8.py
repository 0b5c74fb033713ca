"""FP8 weights as they are published: each with scales beside it, per tensor, per row or per
block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from draftsmith.errors import UserError

# DeepSeek's name for its blocks' scales, which multiply in spite of it, and that of others.
SCALES = ("_scale_inv", "_scale")
BLOCK = (128, 128)  # where a config does not say it
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


def block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block with a scale of its own."""
    block = (config.get("quantization_config") or {}).get("weight_block_size")
    return tuple(block) if block else BLOCK


def dequantised(
    tensors: Mapping[str, torch.Tensor], where: str, block: tuple[int, int] = BLOCK
) -> dict[str, torch.Tensor]:
    """The same tensors in the type of those that were never quantised, without the scales."""
    codes = {name for name, tensor in tensors.items() if tensor.dtype in CODES}
    if not codes:
        return dict(tensors)
    scales = {name: scale_of(name, tensors, where) for name in codes}
    used = {scale for scale, _ in scales.values()}
    dtype = kept_dtype(tensor for name, tensor in tensors.items() if name not in codes | used)
    return {
        name: spread(tensor, scales[name][1], block, name).to(dtype) if name in codes else tensor
        for name, tensor in tensors.items()
        if name not in used
    }


def scale_of(
    name: str, tensors: Mapping[str, torch.Tensor], where: str
) -> tuple[str, torch.Tensor]:
    for ending in SCALES:
        if name + ending in tensors:
            return name + ending, tensors[name + ending]
    raise UserError(
        f"weight {name!r} of {where!r} is stored as FP8 without its {name + SCALES[0]!r}; restore "
        "the folder"
    )


def spread(
    codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], name: str
) -> torch.Tensor:
    """Codes [R, C] times one scale, [R], [R, 1], or a scale for each block, of which the last ones
    need not be whole."""
    values, scale = codes.float(), scale.float()
    if scale.numel() == 1:
        return values * scale.reshape(())
    if scale.shape in ((len(values),), (len(values), 1)):
        return values * scale.reshape(-1, *[1] * (values.ndim - 1))
    wanted = tuple(-(-size // length) for size, length in zip(values.shape, block, strict=True))
    if scale.shape != wanted:
        raise UserError(
            f"the FP8 scales of weight {name!r} have shape {list(scale.shape)} where blocks of "
            f"{block[0]} x {block[1]} give {list(wanted)}; put the right weight_block_size into "
            "quantization_config of config.json"
        )
    for dimension, length in enumerate(block):
        size = values.shape[dimension]
        scale = scale.repeat_interleave(length, dim=dimension).narrow(dimension, 0, size)
    return values * scale


def kept_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Type of the first weight with a fraction; bfloat16 where there is none."""
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.bfloat16)
