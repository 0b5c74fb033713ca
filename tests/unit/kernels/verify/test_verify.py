"""Chain verification: edge cases and distributions, on the reference and on the Triton kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.sampling.random_streams import Purpose, sample, uniform
from draftsmith.kernels.statistics import g_test
from draftsmith.kernels.verify.chain import verify_chain, verify_chain_torch
from draftsmith.kernels.verify.verdict import Verdict

Verify = Callable[..., Verdict]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # hypothesis takes no fixture


def triton_small_blocks(*arguments: torch.Tensor | None) -> Verdict:
    """Blocks of 16 tokens, so that small vocabularies have several."""
    from draftsmith.kernels.verify.chain_triton import verify_chain_triton

    return verify_chain_triton(*arguments, block=16)


CHOICES = {
    "torch": verify_chain_torch,
    "triton": triton_small_blocks,
}


@pytest.fixture(params=list(CHOICES))
def verify(request: pytest.FixtureRequest, device: torch.device, poisoned_empty: None) -> Verify:
    chosen = CHOICES[request.param]

    def on_device(*arguments: torch.Tensor | None) -> Verdict:
        moved = (None if argument is None else argument.to(device) for argument in arguments)
        return Verdict(*(tensor.cpu() for tensor in chosen(*moved)))

    return on_device


def ids(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_tokens_without_mass_are_never_kept(verify: Verify) -> None:
    size, rows = 21, 12
    p = torch.randn(rows * 2, size, generator=torch.Generator().manual_seed(1))
    q = torch.randn(rows, 1, size, generator=torch.Generator().manual_seed(2))
    drafts = torch.randint(size, (rows, 1), generator=torch.Generator().manual_seed(3))
    first = torch.arange(rows) * 2
    no_p, no_q = p.clone(), q.clone()
    no_p[first, drafts[:, 0]] = -math.inf
    no_q[torch.arange(rows), 0, drafts[:, 0]] = -math.inf
    everyone = torch.ones(rows, dtype=torch.int64), torch.arange(rows), torch.arange(rows)
    for p_logits, q_logits in ((no_p, q), (no_p, None), (p, no_q)):
        verdict = verify(p_logits, drafts, everyone[0], q_logits, *everyone[1:])
        assert verdict.accepted.tolist() == [0] * rows
        assert (p_logits[first, verdict.tokens[:, 0]] > -math.inf).all()


def test_broken_distributions_are_survived(verify: Verify) -> None:
    """A draft distribution of NaN or without mass keeps nothing and leaves p; NaN in p has no mass;
    p without any gives -1."""
    size = 19
    p = torch.randn(6, size, generator=torch.Generator().manual_seed(4))
    q = torch.randn(3, 1, size, generator=torch.Generator().manual_seed(5))
    q[0], q[1] = math.nan, -math.inf
    p[4, 1:] = math.nan
    drafts = ids([3], [3], [3])
    verdict = verify(p, drafts, ids(1, 1, 1), q, ids(0, 1, 2), ids(0, 0, 0))
    assert verdict.accepted.tolist() == [0, 0, 0]
    assert verdict.tokens[2, 0] == 0, "all of row 4's mass is at token 0"
    assert (verdict.tokens[:2, 0] >= 0).all()
    p[4] = math.nan
    assert verify(p, drafts, ids(1, 1, 1), q, ids(0, 1, 2), ids(0, 0, 0)).tokens[2].tolist() == [
        -1,
        -1,
    ]


def test_a_distribution_without_mass_emits_draws_of_p(verify: Verify) -> None:
    p, size = torch.randn(2, 24, generator=torch.Generator().manual_seed(6)), 24
    broken = torch.full((1, 1, size), math.nan)
    tokens = [
        verify(p, ids([5]), ids(1), broken, ids(seed), ids(0)).tokens[0, 0].item()
        for seed in range(20)
    ]
    drawn = sample(
        p[:1].expand(20, size),
        torch.arange(20),
        torch.zeros(20, dtype=torch.int64),
        Purpose.RESIDUAL,
    )
    assert tokens == drawn.tolist()


def test_what_replaces_a_draft_that_was_never_drawn_is_a_draw_of_p(verify: Verify) -> None:
    """A placeholder or a token without mass in q says nothing about q, so that q is not
    subtracted."""
    p, q = torch.randn(2, 24, generator=torch.Generator().manual_seed(18)), torch.zeros(1, 1, 24)
    q[0, 0, 5] = -math.inf
    drawn = sample(
        p[:1].expand(5, 24), torch.arange(5), torch.zeros(5, dtype=torch.int64), Purpose.RESIDUAL
    )
    for token in (-1, 5):
        drafts, everyone = torch.full((5, 1), token), torch.arange(5)
        verdict = verify(
            p.repeat(5, 1),
            drafts,
            torch.ones_like(everyone),
            q.expand(5, 1, 24),
            everyone,
            0 * everyone,
        )
        assert torch.equal(verdict.tokens[:, 0], drawn)


def test_one_hot_rows_stand_for_deterministic_ones(verify: Verify) -> None:
    p = torch.randn(12, 40, generator=torch.Generator().manual_seed(8))
    drafts = torch.randint(40, (4, 2), generator=torch.Generator().manual_seed(9))
    one_hot_q = torch.full((4, 2, 40), -math.inf).scatter_(-1, drafts[..., None], 0.0)
    arguments = torch.full((4,), 2), None, torch.arange(4), torch.arange(4)
    without = verify(p, drafts, *arguments)
    with_distributions = verify(p, drafts, arguments[0], one_hot_q, *arguments[2:])
    assert torch.equal(without.tokens, with_distributions.tokens)


def test_an_empty_batch_and_no_drafts(verify: Verify) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    verdict = verify(torch.zeros(0, 9), nothing.view(0, 3), nothing, None, nothing, nothing)
    assert verdict.tokens.shape == (0, 4)
    p = torch.randn(3, 9, generator=torch.Generator().manual_seed(10))
    verdict = verify(
        p, ids().view(1, 0).expand(3, 0), ids(0, 0, 0), None, ids(4, 5, 6), ids(7, 8, 9)
    )
    assert torch.equal(verdict.tokens[:, 0], sample(p, ids(4, 5, 6), ids(7, 8, 9), Purpose.BONUS))


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 33, 130])
@pytest.mark.parametrize("true_q", [True, False])
def test_triton_decides_as_the_reference(
    size: int, true_q: bool, device: torch.device, poisoned_empty: None
) -> None:
    generator = torch.Generator().manual_seed(size)
    rows, depth = 12, 3
    lengths = torch.randint(0, depth + 1, (rows,), generator=generator)
    p = 2 * torch.randn(int((lengths + 1).sum()), size, generator=generator)
    q = 2 * torch.randn(rows, depth, size, generator=generator)
    p[p < -2.5], q[q < -2.5] = -math.inf, -math.inf
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 100_000, (rows,), generator=generator)
    drafts = torch.stack(
        [sample(q[:, i], seeds, positions + i, Purpose.DRAFT) for i in range(depth)], dim=1
    )
    arguments = [t.to(device) for t in (p, drafts, lengths, q, seeds, positions)]
    arguments[3] = arguments[3] if true_q else None
    reference, ours = verify_chain_torch(*arguments), triton_small_blocks(*arguments)
    # The seeds are such that no draw lies within rounding of its threshold.
    assert torch.equal(ours.accepted, reference.accepted)
    assert torch.equal(ours.tokens, reference.tokens)


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 45), (torch.float16, 130)])
def test_narrow_logits_are_read_as_they_are(verify: Verify, dtype: torch.dtype, size: int) -> None:
    p = torch.randn(8, size, generator=torch.Generator().manual_seed(11)).to(dtype)
    q = torch.randn(4, 1, size, generator=torch.Generator().manual_seed(12)).to(dtype)
    arguments = torch.full((4,), 1), torch.arange(4), torch.arange(4)
    drafts = sample(q[:, 0].float(), arguments[1], arguments[2], Purpose.DRAFT)[:, None]
    narrow = verify(p, drafts, arguments[0], q, *arguments[1:])
    wide = verify(p.float(), drafts, arguments[0], q.float(), *arguments[1:])
    assert torch.equal(narrow.tokens, wide.tokens)


def test_strided_distributions(verify: Verify) -> None:
    wide = torch.randn(6, 30, generator=torch.Generator().manual_seed(13))
    q = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(14))
    arguments = ids([3, 4], [5, 6]), ids(2, 2)
    views = verify(wide[:, :17], *arguments, q[:, 1:3, :17], ids(1, 2), ids(3, 4))
    copies = verify(
        wide[:, :17].contiguous(), *arguments, q[:, 1:3, :17].contiguous(), ids(1, 2), ids(3, 4)
    )
    assert torch.equal(views.tokens, copies.tokens)


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(15)
    lengths = torch.randint(0, 4, (25,), generator=generator)
    p = torch.randn(int((lengths + 1).sum()), 40, generator=generator)
    q = torch.randn(25, 3, 40, generator=generator)
    drafts = torch.randint(40, (25, 3), generator=generator)
    seeds, positions = torch.arange(25) * 7, torch.arange(25)
    together = verify_chain(p, drafts, lengths, q, seeds, positions)
    begin = 0
    for row in range(25):
        one, length = slice(row, row + 1), int(lengths[row])
        distribution = p[begin : begin + length + 1]
        alone = verify_chain(
            distribution, drafts[one], lengths[one], q[one], seeds[one], positions[one]
        )
        shorter = verify_chain(
            distribution,
            drafts[one, :length],
            lengths[one],
            q[one, :length],
            seeds[one],
            positions[one],
        )
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(shorter.tokens[0], together.tokens[row, : length + 1])
        begin += length + 1


@pytest.mark.long
@pytest.mark.parametrize("impl", ["torch", "triton"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_invariants(impl: str, data: st.DataObject) -> None:
    """Length, prefix, mask, range and determinism, for any logits hypothesis can think of."""
    size, depth = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 3))
    rows = data.draw(st.integers(1, 3))
    number = st.one_of(
        st.floats(-40, 40, width=32), st.sampled_from([math.nan, -math.inf, math.inf])
    )

    def distribution(*shape: int) -> torch.Tensor:
        count = math.prod(shape)
        return torch.tensor(data.draw(st.lists(number, min_size=count, max_size=count))).view(shape)

    lengths = ids(*(data.draw(st.integers(0, depth)) for _ in range(rows)))
    p, q = distribution(int((lengths + 1).sum()), size), data.draw(st.one_of(st.none(), st.just(0)))
    q = None if q is None else distribution(rows, depth, size)
    drafts = ids(*(data.draw(st.integers(-1, size - 1)) for _ in range(rows * depth))).view(
        rows, depth
    )
    seeds = ids(*(data.draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(rows)))
    given = p, drafts, lengths, q, seeds, torch.arange(rows)
    arguments = [None if tensor is None else tensor.to(DEVICE) for tensor in given]
    verdict, again = (verify_chain(*arguments, impl=impl) for _ in range(2))
    assert torch.equal(verdict.tokens, again.tokens) and torch.equal(
        verdict.accepted, again.accepted
    )
    first = 0
    for row in range(rows):
        kept, tokens = int(verdict.accepted[row]), verdict.tokens[row].tolist()
        assert 0 <= kept <= lengths[row]
        assert tokens[:kept] == drafts[row, :kept].tolist() and all(
            token >= 0 for token in tokens[:kept]
        )
        assert tokens[kept + 1 :] == [-1] * (depth - kept)
        for place in range(kept + 1):
            mass = torch.nan_to_num(p[first + place], nan=-math.inf, posinf=1.0, neginf=-math.inf)
            if tokens[place] < 0:
                assert place == kept and (mass == -math.inf).all()
            else:
                assert tokens[place] < size and mass[tokens[place]] > -math.inf
        first += int(lengths[row]) + 1


def test_accept_decision_is_the_uniform_against_the_ratio() -> None:
    rows, size = 500, 7
    generator = torch.Generator().manual_seed(16)
    p, q = (
        torch.randn(2 * rows, size, generator=generator),
        torch.randn(rows, 1, size, generator=generator),
    )
    seeds, positions = torch.arange(rows), torch.arange(rows) + 3
    drafts = sample(q[:, 0], seeds, positions, Purpose.DRAFT)[:, None]
    verdict = verify_chain(p, drafts, torch.ones(rows, dtype=torch.int64), q, seeds, positions)
    probs_p, probs_q = p[::2].double().softmax(-1), q[:, 0].double().softmax(-1)
    ratio = (probs_p / probs_q).gather(-1, drafts)[:, 0]
    draws = uniform(seeds, positions, Purpose.ACCEPT)
    clear = (draws - ratio).abs() > 1e-5
    assert torch.equal((draws < ratio)[clear], verdict.accepted.bool()[clear])
    assert 100 < verdict.accepted.sum() < 450


@pytest.mark.parametrize("drawn_with, fits", [(Purpose.DRAFT, True), (Purpose.RESIDUAL, False)])
def test_a_draft_opposed_to_the_target_leaves_its_distribution(
    drawn_with: Purpose, fits: bool
) -> None:
    """q = softmax(-target logits), 16 tokens, 200,000 rounds: the setting in which vLLM's shared
    noise stream came to light."""
    rows, size = 200_000, 16
    target = torch.randn(2, size, generator=torch.Generator().manual_seed(17))
    seeds, positions = torch.arange(rows), torch.full((rows,), 5)
    q = -target[:1].expand(rows, size)
    drafts = sample(q, seeds, positions, drawn_with)[:, None]
    verdict = verify_chain(
        target.repeat(rows, 1),
        drafts,
        torch.ones(rows, dtype=torch.int64),
        q[:, None],
        seeds,
        positions,
    )
    first = g_test(torch.bincount(verdict.tokens[:, 0], minlength=size), target[0].softmax(-1))
    assert (first.p_value > 1e-6) == fits
    kept = verdict.tokens[verdict.accepted == 1, 1]
    assert g_test(torch.bincount(kept, minlength=size), target[1].softmax(-1)).p_value > 1e-6
    alpha = torch.minimum(target[0].softmax(-1), (-target[0]).softmax(-1)).sum().item()
    if fits:
        assert abs(verdict.accepted.float().mean().item() - alpha) < 5 * math.sqrt(
            alpha * (1 - alpha) / rows
        )


def test_an_impossible_implementation_raises() -> None:
    arguments = torch.zeros(1, 4), ids().view(1, 0), ids(0), None, ids(0), ids(0)
    with pytest.raises(ValueError, match="'cuda-please'"):
        verify_chain(*arguments, impl="cuda-please")
