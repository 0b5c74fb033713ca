"""Which failures are one request's own: those end that request alone, with one sentence to its client."""

from __future__ import annotations

import torch

# What the machine cannot do, whichever request meets it first.
_SHARED = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)


def is_own(error: Exception) -> bool:
    """Whether an exception raised while one request's share of a round was worked on says nothing about the others."""
    return not isinstance(error, _SHARED)


def sentence(what: str, error: Exception) -> str:
    return f"{what} raised {type(error).__name__}: {' '.join(str(error).split())}"
