"""Low-rank changes of linear layers at some tokens of a pass; the other tokens' outputs stay those
of the layer, bit by bit.

Legend: T tokens of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn


class Delta(NamedTuple):
    """One adapter's change of one layer: `b(a(x)) * scaling`, as peft computes it."""

    a: nn.Module
    b: nn.Module
    scaling: float

    def added(
        self, inputs: torch.Tensor, output: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """`output` [..., T, out] with the change of `tokens` [n] added."""
        chosen = inputs.index_select(-2, tokens).to(next(self.a.parameters()).dtype)
        own = output.index_select(-2, tokens)
        changed = own + self.b(self.a(chosen)) * self.scaling
        return output.index_copy(-2, tokens, changed.to(output.dtype))


class AdaptedTokens:
    """Tokens of the present pass by adapter; of no adapter outside `of`."""

    def __init__(self) -> None:
        self.tokens: Mapping[str, torch.Tensor] = {}
        self.num_tokens = 0

    @contextmanager
    def of(self, tokens: Mapping[str, torch.Tensor], num_tokens: int) -> Iterator[None]:
        self.tokens, self.num_tokens = tokens, num_tokens
        try:
            yield
        finally:
            self.tokens = {}


class LayerDeltas:
    """A forward hook of one linear layer that adds the changes of the pass's adapters."""

    def __init__(self, adapted: AdaptedTokens):
        self.adapted = adapted
        self.deltas: dict[str, Delta] = {}

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> Any:
        for name, tokens in self.adapted.tokens.items():
            delta = self.deltas.get(name)
            if delta is None:
                continue
            if inputs[0].shape[-2] != self.adapted.num_tokens:
                raise RuntimeError(
                    f"a {type(layer).__name__} reads {inputs[0].shape[-2]} of the "
                    f"{self.adapted.num_tokens} tokens of a pass"
                )
            output = delta.added(inputs[0], output, tokens)
        return output
