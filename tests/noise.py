"""Weights that no default gives, so that nothing which is lost or passed over stays unseen."""

from __future__ import annotations

from typing import TypeVar

import torch

M = TypeVar("M", bound=torch.nn.Module)


@torch.no_grad()
def noisy(module: M, seed: int, size: float | None = None) -> M:
    """Adds normal noise of a `size` to every parameter; where none is given, matrices get as much
    as leaves states of one size and gains a tenth."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter += (noise * (spread if size is None else size)).to(parameter.device)
    return module


@torch.no_grad()
def spread(module: M) -> M:
    """Draws weights far larger than an untrained model's: its distributions must differ from token
    to token for a test to be able to fail."""
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module
