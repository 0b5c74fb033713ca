"""Divergences from a sparse target distribution: against the formula of its buckets, and against
the full ones."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.kernels.divergence.fused import Divergence, divergence
from draftsmith.kernels.divergence.kind import PARAMETERS, DivergenceKind, kind_of
from draftsmith.kernels.divergence.rows import RowInputs, divergence_rows
from draftsmith.kernels.divergence.sparse import sparse_rows
from draftsmith.kernels.sampling.top_tokens import TopProbs, top_probs

KINDS = [kind_of(name) for name in PARAMETERS if name != "ce"]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.metric)
NUM_TARGET = 13


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def vocabulary(subset: bool) -> torch.Tensor | None:
    return (
        torch.randperm(NUM_TARGET, generator=torch.Generator().manual_seed(1))[:9]
        if subset
        else None
    )


def sparse(
    kind: DivergenceKind,
    logits: torch.Tensor,
    distribution: TopProbs,
    vocab_map: torch.Tensor | None = None,
) -> Divergence:
    """Of draft logits themselves: states times an identity."""
    head = torch.eye(logits.shape[-1], dtype=logits.dtype)
    return divergence(
        kind,
        logits,
        head,
        distribution,
        torch.ones(len(logits), dtype=logits.dtype),
        vocab_map=vocab_map,
        chunk_size=3,
    )


def bucketed(p: torch.Tensor, q: torch.Tensor, ids: torch.Tensor, vocab_map: torch.Tensor | None):
    """Logits [1, n + 1] of both bucketed distributions on the kept tokens that the draft knows, and
    the kept mass it does not."""
    known = list(range(NUM_TARGET)) if vocab_map is None else vocab_map.tolist()
    inside = [token for token in ids.tolist() if token in known]
    lacking = [token for token in ids.tolist() if token not in known]
    p_kept, q_kept = p[inside], q[[known.index(token) for token in inside]]
    p_tail = 1 - p[ids].sum()
    to_logits = [
        torch.cat([kept, tail[None]]).log()
        for kept, tail in ((p_kept, p_tail), (q_kept, 1 - q_kept.sum()))
    ]
    return *to_logits, p[lacking].sum()


@every_kind
@pytest.mark.parametrize("subset", [False, True])
def test_it_is_the_divergence_of_the_buckets(kind: DivergenceKind, subset: bool) -> None:
    vocab_map = vocabulary(subset)
    target, logits = 2 * draw(5, NUM_TARGET), draw(5, 9 if subset else NUM_TARGET, seed=3)
    distribution = top_probs(target, k=4)
    result = sparse(kind, logits, distribution, vocab_map)
    lacking = 0
    for row in range(5):
        p_logits, q_logits, outside = bucketed(
            target[row].softmax(-1), logits[row].softmax(-1), distribution.ids[row], vocab_map
        )
        # The lacking mass joins the target's side as a token that the draft's buckets do not
        # include.
        full = torch.cat([p_logits, outside.log()[None]])
        map_ = torch.arange(len(q_logits))
        rows = RowInputs(q_logits[None], full[None], torch.ones(1, dtype=torch.float64), map_, None)
        expected = divergence_rows(kind, rows)
        torch.testing.assert_close(result.rows[row], expected.loss[0], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(result.outside[row], outside)
        lacking += int(outside > 0)
    assert lacking > 0 or not subset


@every_kind
@pytest.mark.parametrize("subset", [False, True])
def test_gradients_are_the_derivatives(kind: DivergenceKind, subset: bool) -> None:
    if kind.name == "lk-hybrid":
        # its share is then constant, so that the gradient is a derivative
        kind = DivergenceKind("lk-hybrid", 0.0)
    vocab_map = vocabulary(subset)
    distribution = top_probs(2 * draw(4, NUM_TARGET), k=4)
    logits = draw(4, 9 if subset else NUM_TARGET, seed=3)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0], dtype=torch.float64)
    terms = sparse_rows(kind, logits, distribution, weights, vocab_map)

    def loss(logits: torch.Tensor) -> float:
        return float(
            (weights * sparse_rows(kind, logits, distribution, weights, vocab_map).loss).sum()
        )

    step = 1e-6
    for row in range(4):
        for column in range(logits.shape[-1]):
            up, down = logits.clone(), logits.clone()
            up[row, column] += step
            down[row, column] -= step
            assert terms.grad[row, column].item() == pytest.approx(
                (loss(up) - loss(down)) / (2 * step), abs=2e-9
            )


@every_kind
def test_a_distribution_kept_whole_gives_the_full_divergence(kind: DivergenceKind) -> None:
    target, logits = 2 * draw(5, NUM_TARGET), draw(5, NUM_TARGET, seed=3).requires_grad_()
    ones, head = torch.ones(5, dtype=torch.float64), torch.eye(NUM_TARGET, dtype=torch.float64)
    whole = sparse(kind, logits, top_probs(target, k=NUM_TARGET))
    full = divergence(kind, logits, head, lambda rows: target[rows], ones)
    torch.testing.assert_close(whole.rows, full.rows)
    torch.testing.assert_close(whole.alpha, full.alpha)
    torch.testing.assert_close(
        torch.autograd.grad(whole.loss, logits), torch.autograd.grad(full.loss, logits)
    )


@every_kind
def test_a_tail_that_is_rounding_costs_little(kind: DivergenceKind) -> None:
    """A float32 distribution whose tail came out as 0: the draft's own tail of 3e-9 must not cost a
    hundred nats."""
    target = torch.full((1, NUM_TARGET), -20.0)
    target[0, :4] = torch.tensor([1.0, 0.5, 0.0, -1.0])
    distribution = top_probs(target, k=4)._replace(tail=torch.zeros(1))
    assert float(sparse(kind, target, distribution).rows[0]) < (
        1e-3 if kind.name == "tvd++" else 1e-6
    )


@every_kind
def test_a_row_of_weight_zero_may_hold_nan(kind: DivergenceKind) -> None:
    distribution = top_probs(2 * draw(3, NUM_TARGET), k=4)
    logits = draw(3, NUM_TARGET, seed=3)
    logits[1] = math.nan
    distribution.logprobs[1] = math.nan
    terms = sparse_rows(
        kind, logits, distribution, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), None
    )
    assert terms.loss[1] == 0 and torch.equal(terms.grad[1], torch.zeros_like(terms.grad[1]))
    assert terms.loss.isfinite().all() and terms.grad.isfinite().all()


def test_what_a_sparse_distribution_cannot_give_is_refused() -> None:
    distribution = top_probs(draw(3, NUM_TARGET), k=4)
    with pytest.raises(ValueError, match="'ce' cannot be had"):
        sparse(kind_of("ce"), draw(3, NUM_TARGET), distribution)
    with pytest.raises(ValueError, match="3 rows and there are 2"):
        sparse(kind_of("tv"), draw(2, NUM_TARGET), distribution)
