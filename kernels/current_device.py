"""The current CUDA device of a thread, on which Triton launches and streams are made. It is each
thread's own and begins at 0, wherever the tensors are."""

from __future__ import annotations

import torch


def use_device(device: torch.device | str) -> None:
    """Make `device` the current one of this thread; nothing for a device other than CUDA or without
    an index."""
    there = torch.device(device)
    if there.type == "cuda" and there.index is not None:
        torch.cuda.set_device(there)
