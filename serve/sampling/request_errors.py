"""Failures that concern one request: they end that request alone, with one sentence to its
client."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# What the machine cannot do, whichever request meets it first.
_SHARED = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)


def is_own(error: Exception) -> bool:
    """True when an exception in one request's share of a round says nothing about the others."""
    return not isinstance(error, _SHARED)


def sentence(what: str, error: Exception) -> str:
    return f"{what} raised {type(error).__name__}: {' '.join(str(error).split())}"


@dataclass
class LoneFailures:
    """Rounds that ended requests for failures of their own and gave nothing to any other request.

    Several in a row mean a failure common to all requests: a tokenizer that raises for every text,
    say. Requests that adjust their distributions (a grammar, processors, biases, ...)
    do not count, for that may be what raises.
    """

    rounds: int = 0  # since a request last ended as it should
    _failed: bool = False  # in this round
    _served: bool = False

    def failed(self, *, adjusts: bool) -> None:
        self._failed |= not adjusts

    def served(self, *, ended: bool) -> None:
        """A request got its share of a round; `ended`: all of its answer."""
        self._served = True
        if ended:
            self.rounds = 0

    def end_round(self) -> None:
        if self._failed and not self._served:
            self.rounds += 1
        self._failed = self._served = False
