"""Attention of one step of an unroll by torch's fused attention for CPUs: true keys by
`fused_parts`, and its own chain's keys, one of each later step, which are elementwise products.

Legend: B rows, L columns, N queries, D width of a head; keys are [B, kv_heads, L, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from draftsmith.drafters.unrolled.fused_parts import (
    Geometry,
    add_gradients,
    add_parts,
    merge,
    parts_of,
)


def fused_attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    geometry: Geometry,
) -> torch.Tensor:
    """Scaled queries [B, heads, N, D] of the newest step -> [B, heads, N, D]."""
    return _Fused.apply(query, geometry, *keys, *values)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, geometry: Geometry, *states: torch.Tensor
    ) -> torch.Tensor:
        keys, values = states[: len(states) // 2], states[len(states) // 2 :]
        output, total = _Chain(query, keys, values, geometry).forward()
        parts = list(parts_of(geometry, query))
        add_parts(output, total, query, keys[0], values[0], parts)
        output = output.to(query.dtype)
        ctx.geometry, ctx.parts = geometry, parts
        ctx.save_for_backward(query, output, total, *states)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, output, total, *states = ctx.saved_tensors
        keys, values = states[: len(states) // 2], states[len(states) // 2 :]
        chain = _Chain(query, keys, values, ctx.geometry)
        of_query, *of_chain = chain.backward(gradient, output, total)
        true = (query, keys[0], values[0])
        of_true = add_gradients(of_query, true, gradient, output, total, ctx.parts)
        of_states: list[torch.Tensor | None] = []
        for first, later in zip(of_true, of_chain, strict=True):
            of_states.append(first.to(query.dtype))
            of_states += (
                later[at].squeeze(2).to(query.dtype) if at in later else None
                for at in range(1, len(keys))
            )
        return of_query.to(query.dtype), None, *of_states


class _Chain:
    """Keys of the later steps that a query sees: one each, so many columns back as steps have
    passed since."""

    def __init__(
        self,
        query: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        geometry: Geometry,
    ):
        self.step, self.precise = geometry.step, torch.promote_types(query.dtype, torch.float32)
        # [B, kv_heads, G, N, D]
        self.query = query.to(self.precise).unflatten(1, (keys[0].shape[1], -1))
        oldest = 1 if geometry.window is None else max(1, self.step + 1 - geometry.window)
        self.seen = range(oldest, self.step + 1)
        self.keys, self.values = (
            {later: states[later].to(self.precise)[:, :, None] for later in self.seen}
            for states in (keys, values)
        )

    def _places(self, later: int) -> tuple[slice, slice]:
        """Queries that have a key of this step, and their keys."""
        back = self.step - later
        return slice(back, None), slice(0, max(0, self.query.shape[3] - back))

    def _scores(self, later: int) -> torch.Tensor:
        """[B, kv_heads, G, queries that have a key]."""
        own, other = self._places(later)
        return (self.query[:, :, :, own] * self.keys[later][:, :, :, other]).sum(dim=-1)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, heads, N, D] and log of the sum of exponentials [B, heads, N]."""
        output = torch.zeros_like(self.query)
        total = output.new_full(self.query.shape[:-1], -torch.inf)
        for later in self.seen:
            own, other = self._places(later)
            value = self.values[later][:, :, :, other]
            merge(output[:, :, :, own], total[:, :, :, own], value, self._scores(later))
        return output.flatten(1, 2), total.flatten(1, 2)

    def backward(
        self, gradient: torch.Tensor, output: torch.Tensor, total: torch.Tensor
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Gradients of the query [B, heads, N, D], and of keys and values of all steps."""
        gradient, output = gradient.to(self.precise), output.to(self.precise)
        common = (gradient * output).sum(dim=-1).view(self.query.shape[:-1])
        gradient = gradient.view_as(self.query)
        total = total.view(self.query.shape[:-1])
        of_query = torch.zeros_like(self.query)
        of_keys, of_values = (
            {later: torch.zeros_like(state) for later, state in states.items()}
            for states in (self.keys, self.values)
        )
        for later in self.seen:
            own, other = self._places(later)
            key, value = (states[later][:, :, :, other] for states in (self.keys, self.values))
            out = gradient[:, :, :, own]
            weight = (self._scores(later) - total[:, :, :, own]).exp_()
            of_score = weight * ((out * value).sum(dim=-1) - common[:, :, :, own])
            of_query[:, :, :, own] += of_score.unsqueeze(-1) * key
            for_key = of_score.unsqueeze(-1) * self.query[:, :, :, own]
            of_keys[later][:, :, :, other] = for_key.sum(dim=2, keepdim=True)
            of_values[later][:, :, :, other] = (weight.unsqueeze(-1) * out).sum(2, keepdim=True)
        return of_query.flatten(1, 2), of_keys, of_values
