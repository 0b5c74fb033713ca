"""Where and in which precision this process trains."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch


class Place(NamedTuple):
    device: torch.device
    bf16: bool  # bfloat16 arithmetic over float32 draft weights
    rank: int
    world_size: int

    @property
    def target_dtype(self) -> torch.dtype:
        """Autocast does the rest on a CPU, where the float32 target stays the one that evaluation
        uses."""
        return torch.bfloat16 if self.bf16 and self.device.type == "cuda" else torch.float32


def find_place(dtype: str) -> Place:
    """From what the machine has and what torchrun set."""
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    bf16 = fast_at_bf16(device) if dtype == "auto" else dtype == "bfloat16"
    return Place(
        device, bf16, int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    )


def fast_at_bf16(device: torch.device) -> bool:
    """On a CPU bfloat16 pays only with its own instructions (AVX512-BF16, AMX); without them it is
    slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
