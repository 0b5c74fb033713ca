"""Tokens and hidden states of the engine's recent steps, kept for trials of drafts.

All ranks of an engine take the same steps, so that all keep the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from draftsmith.fleet.engine import logger

NUM_KEPT = 8


class Given(NamedTuple):
    """Inputs of a call of a proposer: token ids [n] and the target's hidden states [n, width]."""

    tokens: torch.Tensor
    states: torch.Tensor


class Recent:
    """The first tokens of the last step, behind them those of longer steps before it.

    Args:
        read: arguments of a proposer's `propose` -> what it is given; None for a dry run.

    Attributes:
        num_tokens: of what is kept
    """

    def __init__(self, read: Callable[..., Given | None]):
        self.read = read
        self.num_tokens = 0
        self._tokens: torch.Tensor | None = None
        self._states: torch.Tensor | None = None

    def watched(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        """`propose`, which keeps a copy of what it is given. No error of the copy reaches it."""

        def keeping(*args: Any, **kwargs: Any) -> Any:
            try:
                self.keep(self.read(*args, **kwargs))
            except Exception:
                logger.debug("draftsmith: the inputs of a step are not kept", exc_info=True)
            return propose(*args, **kwargs)

        return keeping

    def keep(self, given: Given | None) -> None:
        if given is None:
            return
        tokens, states = given.tokens[:NUM_KEPT], given.states[:NUM_KEPT]
        if self._tokens is None or self._states is None:
            self._tokens = torch.full((NUM_KEPT,), -1, dtype=torch.int32, device=tokens.device)
            self._states = states.new_full((NUM_KEPT, states.shape[1]), torch.nan)
        self._tokens[: len(tokens)].copy_(tokens)
        self._states[: len(states)].copy_(states)
        self.num_tokens = max(self.num_tokens, len(tokens))

    def put(self, tokens: torch.Tensor, states: torch.Tensor, *, vocab_size: int) -> None:
        """Write what was kept over the first rows of token ids [n] and hidden states [n, width].
        Tokens that the draft does not have, states of another width and those in which the target
        is not finite are left out: they say nothing about a draft."""
        if self._tokens is None or self._states is None:
            return
        known = (self._tokens >= 0) & (self._tokens < vocab_size)
        first = tokens[:NUM_KEPT]
        first.copy_(torch.where(known, self._tokens, first))
        if self._states.shape[1] == states.shape[1]:
            finite = torch.isfinite(self._states).all(-1, keepdim=True)
            rows = states[:NUM_KEPT]
            rows.copy_(torch.where(finite, self._states, rows))
