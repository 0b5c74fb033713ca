"""Forward KL from hidden states: values and gradients against a plain float64 formula."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from draftsmith.kernels.acceptance import keep_probability, overlap
from draftsmith.kernels.divergence import forward_kl, sparse_forward_kl
from draftsmith.kernels.laws import top_law


class Case(NamedTuple):
    hidden: torch.Tensor
    head: torch.Tensor
    target: torch.Tensor
    weights: torch.Tensor
    vocab_map: torch.Tensor | None
    tokens: torch.Tensor


def make_case(*, num_rows: int = 7, subset: bool, seed: int = 0, dtype: torch.dtype = torch.float64) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    num_target, num_draft, width = 13, 9 if subset else 13, 5
    vocab_map = torch.randperm(num_target, generator=generator)[:num_draft] if subset else None
    tokens = torch.randint(num_target, (num_rows,), generator=generator)
    weights = torch.rand(num_rows, generator=generator, dtype=torch.float64).to(dtype)
    weights[2] = 0
    return Case(normal(num_rows, width), normal(num_draft, width), 2 * normal(num_rows, num_target), weights, vocab_map, tokens)


def plain_loss(case: Case, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    log_q = torch.log_softmax(hidden @ head.T, dim=-1)
    log_p = torch.log_softmax(case.target, dim=-1)
    log_p = log_p if case.vocab_map is None else log_p[:, case.vocab_map]
    return (case.weights * (log_p.exp() * (log_p - log_q)).sum(-1)).sum()


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_loss_and_gradients_are_the_formulas(subset: bool, chunk_size: int) -> None:
    case = make_case(subset=subset)
    hidden, head = case.hidden.clone().requires_grad_(), case.head.clone().requires_grad_()
    result = forward_kl(
        hidden, head, lambda rows: case.target[rows], case.weights, vocab_map=case.vocab_map, chunk_size=chunk_size, impl="torch"
    )
    grads = torch.autograd.grad(3 * result.loss, (hidden, head))
    plain = plain_loss(case, hidden, head)
    torch.testing.assert_close(result.loss, plain, rtol=1e-12, atol=1e-12)
    for ours, exact in zip(grads, torch.autograd.grad(3 * plain, (hidden, head))):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("subset", [False, True])
def test_gradcheck(subset: bool) -> None:
    case = make_case(subset=subset, num_rows=3)

    def loss(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return forward_kl(hidden, head, lambda rows: case.target[rows], case.weights, vocab_map=case.vocab_map, impl="torch").loss

    assert torch.autograd.gradcheck(loss, (case.hidden.requires_grad_(), case.head.requires_grad_()))


@pytest.mark.parametrize("subset", [False, True])
def test_alpha_keep_and_outside_are_the_shared_definitions(subset: bool) -> None:
    case = make_case(subset=subset)
    result = forward_kl(
        case.hidden, case.head, lambda rows: case.target[rows], case.weights, vocab_map=case.vocab_map, tokens=case.tokens
    )
    q_logits = case.hidden @ case.head.T
    outside = torch.zeros(len(q_logits), dtype=torch.float64)
    if subset:
        full = torch.full_like(case.target, -math.inf)
        full[:, case.vocab_map] = q_logits
        q_logits = full
        lacking = torch.ones(case.target.shape[-1], dtype=torch.bool)
        lacking[case.vocab_map] = False
        outside = case.target.softmax(-1)[:, lacking].sum(-1)
        assert lacking[case.tokens].any(), "the case must hold a token outside the subset"
    torch.testing.assert_close(result.alpha, overlap(case.target, q_logits))
    torch.testing.assert_close(result.keep, keep_probability(case.target, q_logits, case.tokens))
    torch.testing.assert_close(result.outside, outside)


def test_a_row_of_weight_zero_may_hold_nan() -> None:
    case = make_case(subset=False)
    hidden, target = case.hidden.clone(), case.target.clone()
    hidden[2], target[2] = math.nan, math.nan
    hidden.requires_grad_()
    head = case.head.clone().requires_grad_()
    result = forward_kl(hidden, head, lambda rows: target[rows], case.weights)
    result.loss.backward()
    torch.testing.assert_close(result.loss, plain_loss(case, case.hidden, case.head))
    assert torch.equal(hidden.grad[2], torch.zeros_like(hidden.grad[2]))
    assert head.grad.isfinite().all()


def test_target_logits_at_minus_infinity_have_no_mass() -> None:
    case = make_case(subset=False)
    target = case.target.clone()
    target[:, 4] = -math.inf
    hidden = case.hidden.clone().requires_grad_()
    result = forward_kl(hidden, case.head, lambda rows: target[rows], case.weights)
    result.loss.backward()
    finite = torch.where(target == -math.inf, -1e4, target)
    torch.testing.assert_close(result.loss, plain_loss(case._replace(target=finite), case.hidden, case.head))
    assert hidden.grad.isfinite().all()


def test_half_precision_hidden_states_keep_float32_sums() -> None:
    case = make_case(subset=True)
    hidden, head = case.hidden.bfloat16().requires_grad_(), case.head.float().requires_grad_()
    result = forward_kl(hidden, head, lambda rows: case.target[rows].float(), case.weights.float(), vocab_map=case.vocab_map)
    result.loss.backward()
    assert (result.loss.dtype, hidden.grad.dtype, head.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    # bfloat16 logits carry 8 bits; the divergence of O(1) logits moves by a few per cent at most.
    assert abs(result.loss.item() / plain_loss(case, case.hidden, case.head).item() - 1) < 0.05


def test_no_rows_gives_zero() -> None:
    case = make_case(subset=False)
    hidden = case.hidden[:0].requires_grad_()
    result = forward_kl(hidden, case.head, lambda rows: case.target[rows], case.weights[:0], tokens=case.tokens[:0])
    result.loss.backward()
    assert result.loss.item() == 0
    assert result.alpha.shape == result.keep.shape == (0,)


def test_wrong_vocabulary_is_named() -> None:
    case = make_case(subset=True)
    with pytest.raises(ValueError, match="9 tokens and 13 are expected"):
        forward_kl(case.hidden, case.head, lambda rows: case.target[rows], case.weights)


def test_full_top_law_gives_the_full_divergence() -> None:
    case = make_case(subset=False)
    logits = (case.hidden @ case.head.T).requires_grad_()
    sparse = sparse_forward_kl(logits, top_law(case.target, k=13), case.weights)
    exact = plain_loss(case, case.hidden, case.head)
    torch.testing.assert_close(sparse.loss, exact)
    assert torch.autograd.gradcheck(lambda z: sparse_forward_kl(z, top_law(case.target, k=13), case.weights).loss, (logits,))


@pytest.mark.parametrize("subset", [False, True])
def test_sparse_divergence_is_the_formula_of_its_buckets(subset: bool) -> None:
    case = make_case(subset=subset)
    law = top_law(case.target, k=4)
    logits = (case.hidden @ case.head.T).requires_grad_()
    result = sparse_forward_kl(logits, law, case.weights, vocab_map=case.vocab_map)
    expected, outside = 0.0, []
    ids_of_draft = list(range(13)) if case.vocab_map is None else case.vocab_map.tolist()
    for row in range(len(logits)):
        q = logits[row].softmax(-1).tolist()
        q_of = dict(zip(ids_of_draft, q))
        kept = [(i, math.exp(lp)) for i, lp in zip(law.ids[row].tolist(), law.logprobs[row].tolist())]
        tail, q_tail = law.tail[row].item(), 1 - sum(q_of.get(i, 0.0) for i, _ in kept)
        kl = sum(p * math.log(p / q_of[i]) for i, p in kept if i in q_of) + tail * math.log(tail / q_tail)
        expected += case.weights[row].item() * kl
        outside.append(sum(p for i, p in kept if i not in q_of))
    torch.testing.assert_close(result.loss.item(), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(result.outside, torch.tensor(outside, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda z: sparse_forward_kl(z, law, case.weights, vocab_map=case.vocab_map).loss, (logits,))
    full = forward_kl(case.hidden, case.head, lambda rows: case.target[rows], case.weights, vocab_map=case.vocab_map)
    assert (result.alpha <= full.alpha + 1e-12).all()


def test_memory_held_is_not_rows_times_vocabulary() -> None:
    """What autograd holds until backward: two gradients, never logits."""
    num_rows, width, num_tokens = 64, 4, 4096
    hidden = torch.randn(num_rows, width, requires_grad=True)
    head = torch.randn(num_tokens, width, requires_grad=True)
    target = torch.randn(num_tokens, width)
    loss = forward_kl(hidden, head, lambda rows: hidden[rows].detach() @ target.T, torch.ones(num_rows), chunk_size=8).loss
    held = sum(grad.numel() for grad in loss.grad_fn.grads)
    assert held == num_rows * width + num_tokens * width
    assert loss.grad_fn.saved_tensors == ()
