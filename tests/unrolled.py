"""What training computes of a text, for tests that compare it with what is drafted there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftsmith.drafters.interface import Proposal, UnrollBatch, head_of
from draftsmith.drafters.target.target import Target


def unroll_batch(
    drafter: Any,
    target: Target,
    ids: torch.Tensor,
    num_steps: int,
    mask: torch.Tensor | None = None,
    **more: Any,
) -> UnrollBatch:
    """Texts [B, L] with the target's states of them; `mask` None: whole ones."""
    mask = torch.ones_like(ids) if mask is None else mask
    taps, _ = target.states(ids, mask, drafter.taps, segments=more.get("segments"))
    return UnrollBatch(input_ids=ids, attention_mask=mask, taps=taps, num_steps=num_steps, **more)


@torch.no_grad()
def unrolled_logits(
    drafter: Any, target: Target, text: Sequence[int], drafts: Sequence[int]
) -> torch.Tensor:
    """[K, V] raw draft logits of the tokens `drafts` behind `text`, each drafted at its depth."""
    batch = unroll_batch(drafter, target, torch.tensor([[*text, *drafts]]), len(drafts))
    steps, rows = list(drafter.unroll(batch)), []
    for depth in range(len(drafts)):
        step = steps[min(depth, len(steps) - 1)]
        column = len(text) + depth - step.offset
        assert bool(step.valid[0, column])
        head = head_of(step, drafter)
        rows.append(head @ step.hidden[0, column].to(head.dtype))
    logits = torch.stack(rows)
    if drafter.vocab_map is None:
        return logits
    return logits.new_full((len(rows), target.vocab_size), -torch.inf).index_copy(
        1, drafter.vocab_map, logits
    )


def assert_unrolls_as_drafted(
    drafter: Any, target: Target, text: Sequence[int], proposal: Proposal, rtol: float = 1e-5
) -> None:
    """Of the first row, drawn at temperature 1."""
    assert proposal.logits is not None
    drafts = proposal.tokens[0, : int(proposal.lengths[0])].tolist()
    torch.testing.assert_close(
        proposal.logits[0, : len(drafts)].double().softmax(-1),
        unrolled_logits(drafter, target, text, drafts).double().softmax(-1),
        atol=1e-5,
        rtol=rtol,
    )
