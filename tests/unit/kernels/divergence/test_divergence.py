"""Divergences from hidden states: values and gradients against plain float64 formulas, written as
one would on a blackboard.

What a method holds constant (tvd++'s advantage, lk-hybrid's share) is detached there, so that the
gradient is the method's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.divergence.fused import Divergence, divergence
from draftsmith.kernels.divergence.kind import PARAMETERS, DivergenceKind, kind_of
from draftsmith.kernels.divergence.rows import LEAST_DEVIATION, RowInputs, divergence_rows
from draftsmith.kernels.overlap import keep_probability, overlap

KINDS = [kind_of(name) for name in PARAMETERS] + [kind_of("jsd:0.1"), kind_of("lk-hybrid:10")]
NAMES = [f"{kind.name}:{kind.parameter:g}" for kind in KINDS]


class Case(NamedTuple):
    hidden: torch.Tensor
    head: torch.Tensor
    target: torch.Tensor
    weights: torch.Tensor
    vocab_map: torch.Tensor | None
    tokens: torch.Tensor


def make_case(
    *, num_rows: int = 7, subset: bool, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    num_target, num_draft, width = 13, 9 if subset else 13, 5
    vocab_map = torch.randperm(num_target, generator=generator)[:num_draft] if subset else None
    tokens = torch.randint(num_target, (num_rows,), generator=generator)
    weights = torch.rand(num_rows, generator=generator, dtype=torch.float64).to(dtype)
    weights[2] = 0
    return Case(
        normal(num_rows, width),
        normal(num_draft, width),
        2 * normal(num_rows, num_target),
        weights,
        vocab_map,
        tokens,
    )


def full_distribution(
    logits: torch.Tensor, vocab_map: torch.Tensor | None, size: int
) -> torch.Tensor:
    """[t, Vd] draft logits -> [t, V] probabilities, 0 outside the draft vocabulary."""
    q = logits.softmax(-1)
    return (
        q
        if vocab_map is None
        else torch.zeros(len(q), size, dtype=q.dtype).index_copy(1, vocab_map, q)
    )


def plain_rows(
    name: str, parameter: float, p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """[t] a divergence of full distributions [t, V], whose gradient is the method's."""
    both = (q > 0) & (p > 0)
    kl = torch.where(both, p * (p / torch.where(both, q, 1)).log(), 0).sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    if name == "forward-kl":
        return kl
    if name == "reverse-kl":
        return torch.where(both, q * (torch.where(both, q, 1) / p).log(), 0).sum(-1)
    if name == "jsd":
        mixture = parameter * p + (1 - parameter) * q
        from_p = torch.where(p > 0, p * (p / mixture).log(), 0).sum(-1)
        from_q = torch.where(q > 0, q * (torch.where(q > 0, q, 1) / mixture).log(), 0).sum(-1)
        return parameter * from_p + (1 - parameter) * from_q
    if name == "tv":
        return (p - q).abs().sum(-1) / 2
    if name == "lk-alpha":
        return -alpha.log()
    if name == "lk-hybrid":
        share = (-parameter * alpha).exp().detach()
        return share * kl + (1 - share) * (1 - alpha)
    if name == "ce":
        x = q.gather(-1, tokens[:, None])[:, 0]
        return torch.where(x > 0, -torch.where(x > 0, x, 1).log(), 0)
    raise AssertionError(name)


def policy_gradient(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """tvd++ as a surrogate: -E_q[advantage log q], rewards less their mean over their deviation,
    all of it constant but log q."""
    reward = (p > q).double()
    mean = (q * reward).sum(-1, keepdim=True)
    deviation = (q * (reward - mean) ** 2).sum(-1, keepdim=True).sqrt()
    advantage = ((reward - mean) / deviation).detach()
    log_q = torch.where(q > 0, q, 1).log()
    return -(q.detach() * advantage * log_q).sum(-1)


def arc(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """tvd++'s value."""
    wanted = p > q
    p_mass, q_mass = ((distribution * wanted).sum(-1).clamp(max=1) for distribution in (p, q))
    return 2 * (p_mass.sqrt().asin() - q_mass.sqrt().asin())


def plain_losses(
    kind: DivergenceKind, case: Case, hidden: torch.Tensor, head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(value [T], what to differentiate [T]); the same tensor but for tvd++."""
    p = case.target.softmax(-1)
    q = full_distribution(hidden @ head.T, case.vocab_map, case.target.shape[-1])
    if kind.name == "tvd++":
        return arc(p, q).detach(), policy_gradient(p, q)
    rows = plain_rows(kind.name, kind.parameter, p, q, case.tokens)
    return rows.detach(), rows


def ours(
    kind: DivergenceKind,
    case: Case,
    hidden: torch.Tensor,
    head: torch.Tensor,
    chunk_size: int | None = None,
) -> Divergence:
    return divergence(
        kind,
        hidden,
        head,
        lambda rows: case.target[rows],
        case.weights,
        vocab_map=case.vocab_map,
        tokens=case.tokens,
        impl="torch",
        chunk_size=chunk_size,
    )


every_kind = pytest.mark.parametrize("kind", KINDS, ids=NAMES)


@every_kind
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("chunk_size", [3, 100])
def test_values_and_gradients_are_the_formulas(
    kind: DivergenceKind, subset: bool, chunk_size: int
) -> None:
    case = make_case(subset=subset)
    hidden, head = case.hidden.clone().requires_grad_(), case.head.clone().requires_grad_()
    result = ours(kind, case, hidden, head, chunk_size)
    values, differentiable = plain_losses(kind, case, hidden, head)
    counted = case.weights != 0
    torch.testing.assert_close(
        result.rows, torch.where(counted, values, 0.0), rtol=1e-11, atol=1e-12
    )
    torch.testing.assert_close(result.loss, (values * case.weights).sum(), rtol=1e-11, atol=1e-12)
    exact = torch.autograd.grad(3 * (differentiable * case.weights).sum(), (hidden, head))
    for grad, expected in zip(torch.autograd.grad(3 * result.loss, (hidden, head)), exact):
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)
    assert (result.rows[counted] > 0).any()


@every_kind
def test_alpha_keep_and_outside_are_the_shared_definitions(kind: DivergenceKind) -> None:
    case = make_case(subset=True)
    result = ours(kind, case, case.hidden, case.head)
    q_logits = torch.full_like(case.target, -math.inf)
    q_logits[:, case.vocab_map] = case.hidden @ case.head.T
    lacking = torch.ones(case.target.shape[-1], dtype=torch.bool)
    lacking[case.vocab_map] = False
    assert lacking[case.tokens].any(), "the case must hold a token outside the subset"
    torch.testing.assert_close(result.alpha, overlap(case.target, q_logits))
    torch.testing.assert_close(result.keep, keep_probability(case.target, q_logits, case.tokens))
    torch.testing.assert_close(result.outside, case.target.softmax(-1)[:, lacking].sum(-1))


@every_kind
def test_a_row_of_weight_zero_may_hold_nan(kind: DivergenceKind) -> None:
    case = make_case(subset=True)
    hidden, target = case.hidden.clone(), case.target.clone()
    hidden[2], target[2] = math.nan, math.nan
    hidden.requires_grad_()
    head = case.head.clone().requires_grad_()
    result = ours(kind, case._replace(target=target), hidden, head)
    result.loss.backward()
    torch.testing.assert_close(result.loss, ours(kind, case, case.hidden, case.head).loss)
    assert torch.equal(hidden.grad[2], torch.zeros_like(hidden.grad[2]))
    assert head.grad.isfinite().all()


@every_kind
def test_tokens_that_the_target_rules_out(kind: DivergenceKind) -> None:
    """Target logits of -inf: no mass. For reverse-kl such a token costs 100 nats; the others have a
    finite limit."""
    case = make_case(subset=False)
    ruled_out = torch.tensor([4, 8])
    target, nearly = case.target.clone(), case.target.clone()
    target[:, ruled_out], nearly[:, ruled_out] = -math.inf, -90.0
    hidden = case.hidden.clone().requires_grad_()
    result = ours(kind, case._replace(target=target), hidden, case.head)
    result.loss.backward()
    assert result.loss.isfinite() and hidden.grad.isfinite().all()
    if kind.name == "reverse-kl":
        q = (case.hidden @ case.head.T).softmax(-1)[:, ruled_out].sum(-1)
        p = target.softmax(-1)
        q_all = (case.hidden @ case.head.T).softmax(-1)
        rest = torch.where(
            p > 0, q_all * (q_all / torch.where(p > 0, p, 1)).log(), q_all * (q_all.log() + 100)
        ).sum(-1)
        assert (q > 0).all()
        torch.testing.assert_close(result.rows, torch.where(case.weights != 0, rest, 0.0))
        return
    limit = ours(kind, case._replace(target=nearly), case.hidden, case.head)
    torch.testing.assert_close(result.rows, limit.rows, rtol=1e-9, atol=1e-12)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_stay_finite(kind: DivergenceKind, dtype: torch.dtype) -> None:
    """Distributions that are one-hot and disagree, agree, or leave the draft's token without any
    mass."""
    logits = torch.zeros(4, 6, dtype=dtype)
    logits[0, 0] = logits[1, 1] = logits[2, 2] = 1e4
    target = torch.zeros(4, 6, dtype=dtype)
    target[0, 1] = target[1, 1] = 1e4
    target[2, 3:] = -math.inf
    logits[3, 5] = -math.inf
    head = torch.eye(6, dtype=dtype)
    hidden = logits.clone().requires_grad_()
    weights = torch.ones(4, dtype=dtype)
    # A product with an identity would turn -inf into NaN; the logits are the point here, so the row
    # function is asked.
    terms = divergence_rows(
        kind, RowInputs(logits.clone(), target, weights, None, torch.tensor([1, 1, 0, 0]))
    )
    assert terms.loss.isfinite().all() and terms.grad.isfinite().all()
    assert terms.alpha.tolist() == pytest.approx([0, 1, 1 / 3, 5 / 6])
    if kind.name != "ce":
        assert terms.loss[1] == pytest.approx(0, abs=1e-6)
    rows = slice(0, 3)
    result = divergence(
        kind,
        hidden[rows],
        head,
        lambda part: target[rows][part],
        weights[rows],
        tokens=torch.tensor([1, 1, 0]),
    )
    result.loss.backward()
    assert hidden.grad.isfinite().all()


def test_half_precision_hidden_states_keep_float32_sums() -> None:
    case = make_case(subset=True)
    hidden, head = case.hidden.bfloat16().requires_grad_(), case.head.float().requires_grad_()
    single = case._replace(target=case.target.float(), weights=case.weights.float())
    result = ours(kind_of("forward-kl"), single, hidden, head)
    result.loss.backward()
    assert (result.loss.dtype, hidden.grad.dtype, head.grad.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.float32,
    )
    values, _ = plain_losses(kind_of("forward-kl"), case, case.hidden, case.head)
    # bfloat16 logits carry 8 bits; the divergence of O(1) logits moves by a few per cent at most.
    assert abs(result.loss.item() / (values * case.weights).sum().item() - 1) < 0.05


def test_products_run_in_autocasts_type() -> None:
    """As bfloat16 states and head give them, to the last bit, with float32 gradients."""
    case = make_case(subset=True, dtype=torch.float32)
    hidden, head = case.hidden.clone().requires_grad_(), case.head.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = ours(kind_of("forward-kl"), case, hidden, head)
    result.loss.backward()
    half = ours(kind_of("forward-kl"), case, case.hidden.bfloat16(), case.head.bfloat16())
    assert torch.equal(result.loss, half.loss)
    assert hidden.grad.dtype == head.grad.dtype == torch.float32


def test_no_rows_gives_zero() -> None:
    case = make_case(subset=False)
    empty = case._replace(weights=case.weights[:0], tokens=case.tokens[:0])
    hidden = case.hidden[:0].requires_grad_()
    result = ours(kind_of("tv"), empty, hidden, case.head)
    result.loss.backward()
    assert result.loss.item() == 0
    assert result.alpha.shape == result.keep.shape == result.rows.shape == (0,)


def test_wrong_vocabulary_is_named() -> None:
    case = make_case(subset=True)
    with pytest.raises(ValueError, match="9 tokens and 13 are expected"):
        ours(kind_of("tv"), case._replace(vocab_map=None), case.hidden, case.head)


def test_target_logits_may_be_made_slice_by_slice() -> None:
    case = make_case(subset=False)
    states, head = torch.randn(7, 3, dtype=torch.float64), torch.randn(13, 3, dtype=torch.float64)
    by_head = divergence(
        kind_of("jsd"),
        case.hidden,
        case.head,
        lambda rows: states[rows] @ head.T,
        case.weights,
        chunk_size=2,
    )
    by_logits = ours(kind_of("jsd"), case._replace(target=states @ head.T), case.hidden, case.head)
    torch.testing.assert_close(by_head.loss, by_logits.loss)


def test_memory_held_is_not_rows_times_vocabulary() -> None:
    """What autograd holds until backward: two gradients, never logits; and they are used once."""
    num_rows, width, num_tokens = 64, 4, 4096
    hidden = torch.randn(num_rows, width, requires_grad=True)
    head = torch.randn(num_tokens, width, requires_grad=True)
    states, target_head = hidden.detach(), torch.randn(num_tokens, width)

    def target(rows: slice) -> torch.Tensor:
        return states[rows] @ target_head.T

    loss = divergence(
        kind_of("lk-hybrid"), hidden, head, target, torch.ones(num_rows), chunk_size=8
    ).loss
    held = sum(grad.numel() for grad in loss.grad_fn.grads)
    assert held == num_rows * width + num_tokens * width
    assert loss.grad_fn.saved_tensors == ()
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="already used"):
        loss.backward()


def head_gradient(case: Case, chunk_size: int) -> torch.Tensor:
    head = case.head.bfloat16().requires_grad_()
    single = case._replace(target=case.target.float(), weights=case.weights.float())
    ours(kind_of("tv"), single, case.hidden.bfloat16(), head, chunk_size).loss.backward()
    return head.grad


def test_a_head_gradient_added_up_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(subset=False, num_rows=40)
    grads = []
    for elements in (1 << 26, 10):
        monkeypatch.setattr("draftsmith.kernels.divergence.fused.PRODUCT_ELEMENTS", elements)
        grads.append(head_gradient(case, 1))
    assert torch.equal(*grads)


def test_few_chunks_add_up_in_bfloat16_nearly_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(subset=False, num_rows=160)
    short = head_gradient(case, 10).double()
    monkeypatch.setattr("draftsmith.kernels.divergence.fused.FEW_CHUNKS", 0)
    wide = head_gradient(case, 10).double()
    assert not torch.equal(short, wide)
    # 16 roundings of 2^-9 each, on sums no larger than the largest entry.
    assert (short - wide).abs().max() < 16 * 2**-9 * wide.abs().max()


@pytest.mark.parametrize(
    "text, words",
    [
        ("forward_kl", "did you mean 'forward-kl'"),
        ("jsd:1", "beta must lie between 0 and 1"),
        ("jsd:x", "beta must lie between"),
        ("tv:2", "has no parameter"),
        ("zzz", "choose from"),
    ],
)
def test_a_wrong_name_is_one_sentence_with_the_mend(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind_of(text)


def test_parameters_are_read_and_defaulted() -> None:
    assert kind_of("jsd") == DivergenceKind("jsd", 0.5) and kind_of("jsd:0.25") == DivergenceKind(
        "jsd", 0.25
    )
    assert kind_of("lk-hybrid:10").parameter == 10 and kind_of("tvd++").metric == "tvd_plus_plus"


# Properties


finite = st.floats(-300, 300, width=32)
maybe_ruled_out = st.one_of(finite, st.just(-math.inf))


@st.composite
def distributions(draw: st.DrawFn) -> tuple[list[float], list[float], list[int] | None, int]:
    """(draft logits, target logits with some mass, map of the draft vocabulary, text's token)."""
    num_target = draw(st.integers(1, 8))
    target = draw(st.lists(maybe_ruled_out, min_size=num_target, max_size=num_target))
    target[draw(st.integers(0, num_target - 1))] = draw(finite)
    vocab_map = draw(
        st.one_of(
            st.none(), st.permutations(range(num_target)).map(lambda ids: ids[: 1 + len(ids) // 2])
        )
    )
    num_draft = num_target if vocab_map is None else len(vocab_map)
    draft = draw(st.lists(finite, min_size=num_draft, max_size=num_draft))
    return draft, target, vocab_map, draw(st.integers(-1, num_draft - 1))


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=25, deadline=None)
@given(drawn=distributions())
def test_rows_are_finite_bounded_and_move_no_mass_out_of_nothing(
    kind: DivergenceKind, dtype: torch.dtype, drawn: tuple
) -> None:
    draft, target, vocab_map, column = drawn
    rows = RowInputs(
        torch.tensor([draft], dtype=dtype),
        torch.tensor([target], dtype=dtype),
        torch.ones(1, dtype=dtype),
        None if vocab_map is None else torch.tensor(vocab_map),
        torch.tensor([column]),
    )
    terms = divergence_rows(kind, rows)
    rounding = 1e-3 if dtype == torch.float32 and kind.name == "tvd++" else 1e-5
    assert terms.loss.isfinite().all() and terms.grad.isfinite().all()
    # Forward KL on a part of the vocabulary leaves out a term that alone may be large, so only its
    # whole is never negative.
    if vocab_map is None or kind.name not in ("forward-kl", "lk-hybrid"):
        assert terms.loss >= -rounding
    assert -1e-6 <= terms.alpha <= 1 + 1e-6 and terms.alpha <= 1 - terms.outside + 1e-5
    assert 0 <= terms.keep <= 1 + 1e-6
    # The same amount on all logits changes nothing, so no gradient points that way. tvd++ divides
    # rounding, too.
    scale = 1 / LEAST_DEVIATION if kind.name == "tvd++" else 1.0 + abs(float(terms.loss))
    assert abs(float(terms.grad.double().sum())) <= 100 * torch.finfo(dtype).eps * scale
