"""What every way to verify has in common, on the references and on the Triton kernels; then what is
a chain's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch

from draftsmith.kernels.sampling.random_streams import Purpose, round_seeds, sample, uniform
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.residual import log_distribution
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import DraftTree, TreeVerdict, Verdict
from tests.draft_trees import sibling_distribution, verify_as_tree
from tests.goodness import g_test

Verify = Callable[..., Verdict]


chain_torch, block_torch = (partial(rule, impl="torch") for rule in (verify_chain, verify_block))


def chain_triton(*arguments: torch.Tensor | None) -> Verdict:
    """Blocks of 16 tokens, so that small vocabularies have several; the others likewise."""
    from draftsmith.kernels.verify.chain_triton import verify_chain_triton

    return verify_chain_triton(*arguments, block=16)


def block_triton(*arguments: torch.Tensor) -> Verdict:
    from draftsmith.kernels.verify.block_triton import verify_block_triton

    return verify_block_triton(*arguments, block=16)


def tree_triton(*arguments: object) -> TreeVerdict:
    from draftsmith.kernels.verify.tree_triton import verify_tree_triton

    return verify_tree_triton(*arguments, block=16)


def of_a_chain(verify: Callable[..., TreeVerdict], *arguments: torch.Tensor) -> Verdict:
    """The nodes of such a tree are the tokens that stand."""
    verdict = verify_as_tree(*arguments, verify=verify)
    drafts = arguments[1]
    places = torch.arange(drafts.shape[1], device=drafts.device)
    kept = places < verdict.accepted[:, None]
    assert torch.equal(verdict.nodes, torch.where(kept, places, -1))
    return Verdict(verdict.accepted, verdict.tokens)


WAYS: dict[str, Verify] = {
    "chain": chain_torch,
    "chain, triton": chain_triton,
    "block": block_torch,
    "block, triton": block_triton,
    "tree": partial(of_a_chain, partial(verify_tree, impl="torch")),
    "tree, triton": partial(of_a_chain, tree_triton),
}


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def verify(way: str, device: torch.device, poisoned_empty: None) -> Verify:
    def on_device(*arguments: torch.Tensor | None) -> Verdict:
        moved = (None if argument is None else argument.to(device) for argument in arguments)
        return Verdict(*(tensor.cpu() for tensor in WAYS[way](*moved)))

    return on_device


def ids(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_rounds(seed: int, rows: int, depth: int, size: int) -> tuple[torch.Tensor, ...]:
    """Rounds of up to `depth` drafts from distributions with holes."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, depth + 1, (rows,), generator=generator)
    p = 2 * torch.randn(int((lengths + 1).sum()), size, generator=generator)
    q = torch.randn(rows, depth, size, generator=generator)
    p[p < -2.5], q[q < -2] = -math.inf, -math.inf
    first = torch.cumsum(lengths + 1, 0) - (lengths + 1)
    for row in range(rows):
        own = slice(int(first[row]), int(first[row] + lengths[row]))
        q[row, : lengths[row]] += p[own].clamp(min=-5)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 100_000, (rows,), generator=generator)
    noise = round_seeds(seeds, positions)
    drafts = [sample(q[:, i], noise, positions + i, Purpose.DRAFT) for i in range(depth)]
    return p, torch.stack(drafts, dim=1), lengths, q, seeds, positions


def test_a_token_that_its_distribution_could_not_have_drawn_ends_the_round(verify: Verify) -> None:
    """A placeholder, a distribution without mass, one of NaN and one that excludes the token: what
    follows is a draw of p."""
    size, rows = 21, 4
    p = normal(23, 3, size).repeat(rows, 1)
    q = p.view(rows, 3, size)[:, :2].clone()
    drafts = ids([4, 5], [4, -1], [4, 5], [4, 5])
    q[0, 1], q[2, 1], q[3, 1, 5] = -math.inf, math.nan, -math.inf
    seeds, positions = torch.full((rows,), 9), torch.full((rows,), 30)
    verdict = verify(p, drafts, torch.full((rows,), 2), q, seeds, positions)
    drawn = sample(p[1:2], seeds[:1], positions[:1] + 1, Purpose.RESIDUAL).item()
    assert verdict.accepted.tolist() == [1] * rows
    assert verdict.tokens.tolist() == [[4, drawn, -1]] * rows


def test_broken_targets_are_survived(verify: Verify) -> None:
    """NaN has no mass, and a distribution without any gives -1."""
    p, q = normal(24, 6, 19), normal(25, 3, 1, 19)
    p[0:2], p[2, 1:], p[4, 3] = math.nan, math.nan, -math.inf
    verdict = verify(p, ids([3], [3], [3]), ids(1, 1, 1), q, ids(0, 1, 2), ids(0, 0, 0))
    assert verdict.accepted.tolist() == [0, 0, 0]
    assert verdict.tokens[:2].tolist() == [[-1, -1], [0, -1]]
    assert verdict.tokens[2, 0] not in (-1, 3)


def test_rows_without_drafts_and_an_empty_batch(verify: Verify) -> None:
    _, drafts, _, q, seeds, positions = random_rounds(26, 4, 2, 40)
    lengths, p = ids(0, 2, 0, 1), normal(27, 7, 40)
    verdict = verify(p, drafts, lengths, q, seeds, positions)
    assert (verdict.tokens.ge(0).sum(1) == verdict.accepted + 1).all()
    assert (verdict.accepted <= lengths).all()
    assert verdict.tokens[0, 0] == sample(p[:1], seeds[:1], positions[:1], Purpose.BONUS)
    nothing = ids()
    empty = nothing.view(0, 3), nothing, torch.zeros(0, 3, 9), nothing, nothing
    assert verify(torch.zeros(0, 9), *empty).tokens.shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_and_strided_logits_are_read_as_they_are(verify: Verify, dtype: torch.dtype) -> None:
    size = 45
    p, drafts, lengths, q, seeds, positions = random_rounds(28, 3, 2, size)
    p, q = p.to(dtype), q.to(dtype)
    wide_p = torch.zeros(len(p), size + 15, dtype=dtype)
    wide_q = torch.zeros(3, 4, size + 15, dtype=dtype)
    own = slice(3, size + 3)
    wide_p[:, own], wide_q[:, 1:3, own] = p, q
    narrow = verify(wide_p[:, own], drafts, lengths, wide_q[:, 1:3, own], seeds, positions)
    wide = verify(p.float(), drafts, lengths, q.float(), seeds, positions)
    assert torch.equal(narrow.tokens, wide.tokens)


@pytest.mark.parametrize("size", [5, 49])
def test_every_way_decides_as_its_reference(verify: Verify, way: str, size: int) -> None:
    """The seeds are such that no draw lies within rounding of its threshold, and some blocks stand
    after a draft that a chain rejects."""
    arguments = random_rounds(size, 24, 3, size)
    arguments[1][3, 1] = -1
    reference = chain = chain_torch(*arguments)
    if "block" in way:
        reference = block_torch(*arguments)
        assert (reference.accepted > chain.accepted).any()
    ours = verify(*arguments)
    assert torch.equal(ours.accepted, reference.accepted)
    assert torch.equal(ours.tokens, reference.tokens)
    assert (reference.accepted > 1).any() and (reference.accepted < arguments[2]).any()


def test_deterministic_drafts_are_one_hot_distributions(verify: Verify, way: str) -> None:
    p, drafts, lengths, _, seeds, positions = random_rounds(21, 12, 3, 40)
    drafts[::2, :2] = p[(lengths + 1).cumsum(0) - 1].argmax(-1)[::2, None]
    one_hot = torch.full((12, 3, 40), -math.inf).scatter_(-1, drafts[..., None], 0.0)
    chain = chain_torch(p, drafts, lengths, None, seeds, positions)
    assert set(chain.accepted.tolist()) >= {0, 1}
    if "block" in way:
        found = verify_block(p, drafts, lengths, None, seeds, positions)
    else:
        found = verify(p, drafts, lengths, None, seeds, positions)
        told = verify(p, drafts, lengths, one_hot, seeds, positions)
        assert torch.equal(told.tokens, chain.tokens)
    assert torch.equal(found.tokens, chain.tokens)


def test_blocks_keep_more_than_chains() -> None:
    arguments = random_rounds(3, 2000, 3, 16)
    chain, block = (one(*arguments).accepted.float().mean() for one in (chain_torch, block_torch))
    assert block > 1.01 * chain


# What lies beyond a row's length


def test_nothing_beyond_the_lengths_is_read(verify: Verify, way: str) -> None:
    """Neither token ids nor distributions, nor parents, of which `verify_as_tree` makes junk there.
    The control: the same poison one place earlier is seen."""
    p, drafts, lengths, q, *streams = random_rounds(34, 6, 3, 21)
    places = torch.arange(3)
    for told in (q,) if "block" in way else (q, None):

        def poisoned(begin: torch.Tensor, token: int, told: torch.Tensor | None = told) -> Verdict:
            at = places >= begin[:, None]
            if told is not None:
                told = torch.where(at[..., None], math.nan, told)
            return verify(p, torch.where(at, token, drafts), lengths, told, *streams)

        clean = verify(p, drafts, lengths, told, *streams)
        for token in (2**62, -(10**6)) if told is not None else (2**62,):
            assert torch.equal(poisoned(lengths, token).tokens, clean.tokens)
        if told is not None:
            assert not torch.equal(poisoned(lengths - 1, -1).tokens, clean.tokens)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("rule", [verify_chain, verify_block], ids=["chain", "block"])
def test_rows_of_logits_behind_the_drafts_are_not_read(
    rule: Verify, impl: str, device: torch.device
) -> None:
    """Where the pass was laid out before it was known how much would be drafted."""
    p, *rest = random_rounds(34, 6, 3, 21)
    lengths, places = rest[1], torch.arange(4)
    sizes = (lengths + 1).clamp(max=3)
    read = (places <= lengths[:, None])[places <= sizes[:, None]]
    wide = torch.full((len(read), 21), math.nan)
    wide[read] = p
    rest = [part.to(device) for part in rest]
    expected = rule(p.to(device), *rest, impl=impl)
    found = rule(wide.to(device), *rest, impl=impl, sizes=sizes.to(device))
    assert found.accepted.tolist() == expected.accepted.tolist() and found.accepted.any()
    assert found.tokens.tolist() == expected.tokens.tolist()


# Chains


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


# Large logits, which low temperatures and offsets make: the acceptance test is exact to the rounding
# of a distribution, not of a logit. A float32 near 1250 has a grid of 1.2e-4. Uniforms are picked
# that miss their threshold by less, and float64 says what is right.


SIZE, FIRST, SECOND = 33, 3, 20
NEAREST, FARTHEST = 5e-6, 5e-5  # of u / threshold - 1


class Close(NamedTuple):
    seeds: torch.Tensor  # [B], whose uniforms nearly meet the threshold
    below: torch.Tensor  # [B] bool, on which side


def distributions(offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two distributions [1, V] with thresholds between 0 and 1 at `FIRST` and `SECOND`, so that
    either child may be kept."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(1, SIZE, generator=generator) + offset for _ in range(2))
    q[0, [FIRST, SECOND]] = torch.tensor([3.0, 2.5]) + offset
    p[0, [FIRST, SECOND]] = torch.tensor([2.0, 2.2]) + offset
    return p, q


@cache
def close(*thresholds: float) -> Close:
    """Seeds whose last uniform nearly meets the last threshold, and whose earlier ones lie above
    theirs."""
    seeds = torch.arange(2_000_000)
    here = torch.zeros_like(seeds)
    *earlier, last = thresholds
    for number, threshold in enumerate(earlier):
        above = uniform(seeds, here, Purpose.ACCEPT, here + number) > threshold + 1e-3
        seeds, here = seeds[above], here[above]
    distance = uniform(seeds, here, Purpose.ACCEPT, here + len(earlier)) / last - 1
    chosen = ((distance.abs() > NEAREST) & (distance.abs() < FARTHEST)).nonzero()[:20, 0]
    return Close(seeds[chosen], distance[chosen] < 0)


def check_both_sides(given: Close) -> None:
    assert len(given.seeds) >= 10 and given.below.any() and not given.below.all()


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("way", ["chain", "block", "without q", "tree"])
def test_the_first_test_is_exact(way: str, impl: str, device: torch.device) -> None:
    p, q = distributions(1250.0)
    probs_p, probs_q = log_distribution(p.double()).exp(), log_distribution(q.double()).exp()
    threshold = float(probs_p[0, FIRST] / (1 if way == "without q" else probs_q[0, FIRST]))
    given = close(threshold)
    check_both_sides(given)
    rows = len(given.seeds)
    seeds, zeros = given.seeds.to(device), torch.zeros(rows, dtype=torch.int64, device=device)
    both, drafts, lengths = (
        p.to(device).expand(2 * rows, -1),
        torch.full_like(zeros, FIRST)[:, None],
        zeros + 1,
    )
    told = None if way == "without q" else q.to(device).expand(rows, 1, SIZE)
    verify = {"block": verify_block, "tree": verify_as_tree}.get(way, verify_chain)
    verdict = verify(both, drafts, lengths, told, seeds, zeros, impl=impl)
    assert torch.equal(verdict.accepted.cpu() == 1, given.below)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_later_siblings_test_is_exact(impl: str, device: torch.device) -> None:
    p, q = distributions(1250.0)
    keep = sibling_distribution(
        log_distribution(p.double())[0],
        log_distribution(q.double())[0],
        torch.tensor([FIRST, SECOND]),
    ).keep.tolist()
    given = close(*keep)
    check_both_sides(given)
    rows = len(given.seeds)
    seeds, zeros = given.seeds.to(device), torch.zeros(rows, dtype=torch.int64, device=device)
    tokens = torch.tensor([FIRST, SECOND], device=device).expand(rows, 2)
    q_rows = torch.tensor([0, -1, -1], device=device).expand(rows, 3)
    tree = DraftTree(tokens, torch.full_like(tokens, -1), zeros + 2)
    verdict = verify_tree(
        p.to(device).expand(3 * rows, -1), tree, q.to(device), q_rows, seeds, zeros, impl=impl
    )
    assert torch.equal(verdict.nodes[:, 0].cpu() == 1, given.below)
