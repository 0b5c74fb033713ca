"""Noise on the taps that a draft trains on, so that it tolerates the inexact states it will feed
itself (EAGLE, arXiv:2401.15077)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FeatureNoise:
    """Uniform on [-width, width], in the units of the target's states; published with width 0.1.

    What is drawn depends on seed, step and the batch's tokens alone: a resumed run draws the same.
    """

    width: float
    seed: int
    step: int  # optimizer steps done

    def added(self, taps: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """taps [B, L, n * H] and the tokens [B, L] they were read at -> noisy taps."""
        generator = torch.Generator(device=taps.device)
        seed = (self.seed * 1_000_003 + self.step) * 1_000_003 + int(input_ids.sum())
        generator.manual_seed(seed % (1 << 63))
        unit = torch.rand(taps.shape, generator=generator, device=taps.device, dtype=torch.float32)
        return taps + (self.width * (2 * unit - 1)).to(taps.dtype)
