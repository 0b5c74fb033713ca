"""Checks of memory: the needs of serving and training against what the machine has."""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from draftsmith.drafters.recurrent.kept import NUM_SIDES
from draftsmith.drafters.target.taps import body_name, decoder_layers
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.train.doctor.finding import Finding, ok, warn

GIB = 2**30


class Pooled(Protocol):
    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool | None: ...


def check_serving(target: Target, draft: torch.nn.Module | None, sequences: int) -> Finding:
    """Weights, and keys and values of `sequences` texts of full length."""
    weights = num_bytes(target.model) + (0 if draft is None else num_bytes(draft))
    token = bytes_per_token(target, target) + (
        0 if draft is None else bytes_per_token(draft, target)
    )
    states = NUM_SIDES * target.state_layers.num_bytes
    cache = (token * target.max_positions + states) * sequences
    what = (
        f"weights {weights / GIB:.2f} GiB, keys and values {token / 1024:.1f} KiB per token, "
        f"{cache / GIB:.2f} GiB for {sequences} "
        f"texts of {target.max_positions} tokens"
    )
    if states:
        what += f", of which states {states / 1024:.1f} KiB each"
    return compare(
        "memory.serving",
        what,
        weights + cache,
        target.device,
        "serve fewer or shorter sequences at once",
    )


def check_training(target: Target, draft: torch.nn.Module, max_length: int) -> Finding:
    """The frozen target beside the draft's float32 weights, gradients and two Adam moments."""
    trained = sum(parameter.numel() for parameter in draft.parameters() if parameter.requires_grad)
    needed = held_bytes(target.model) + 16 * trained
    what = (
        f"{trained / 1e6:.1f} M trained parameters; {needed / GIB:.2f} GiB for weights and "
        "optimizer, activations of rows up to "
        f"{max_length} tokens on top"
    )
    return compare(
        "memory.training",
        what,
        needed,
        target.device,
        "use --deepspeed recipes/zero3.json or a smaller draft",
    )


def compare(check: str, what: str, needed: float, device: torch.device, mend: str) -> Finding:
    available = available_bytes(device)
    what += f"; {available / GIB:.1f} GiB on {device.type}"
    return ok(check, what) if needed < available else warn(check, what, mend)


def num_bytes(model: torch.nn.Module) -> int:
    return sum(
        tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers())
    )


def held_bytes(model: torch.nn.Module) -> int:
    """As `num_bytes`, of what this process holds of a target in shares."""
    tensors = (*model.parameters(), *model.buffers())
    own = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in own)


def bytes_in_shares(target: Target, shares: int) -> int:
    """Memory of a process that holds a share of every decoder layer: all else of the target is
    whole, and so are the layer that runs and the next one."""
    body = getattr(target.model, body_name(target.model))
    layers = [num_bytes(one) for one in decoder_layers(body, target.num_layers)]
    if shares == 1:
        return num_bytes(target.model)
    gathered = sum(sorted(layers)[-2:])
    return num_bytes(target.model) - sum(layers) + -(-sum(layers) // shares) + gathered


def bytes_per_token(pooled: Pooled, target: Target) -> float:
    block_size = 16
    pool = pooled.new_pool(1, block_size, target.device, target.dtype)
    return 0.0 if pool is None else pool.num_bytes / block_size


def available_bytes(device: torch.device) -> int:
    """Memory of the whole device: what runs on it now may be gone when the server starts."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
