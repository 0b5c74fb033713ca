"""Block verification: exact distributions by enumeration, joint distributions over whole
generations, edge cases; on reference and Triton."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.sampling.random_streams import Purpose, round_seeds, sample, uniform
from draftsmith.kernels.statistics import g_test
from draftsmith.kernels.verify.block import block_distribution, verify_block, verify_block_torch
from draftsmith.kernels.verify.chain import verify_chain, verify_chain_torch
from draftsmith.kernels.verify.residual import log_distribution, residual_distribution
from draftsmith.kernels.verify.verdict import Verdict

Verify = Callable[..., Verdict]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # hypothesis takes no fixture
FALSE_ALARM = 1e-6  # seeds are fixed, so that a test passes or fails for good


def triton_small_blocks(*arguments: torch.Tensor) -> Verdict:
    """Blocks of 16 tokens, so that small vocabularies have several."""
    from draftsmith.kernels.verify.block_triton import verify_block_triton

    return verify_block_triton(*arguments, block=16)


@pytest.fixture(params=["torch", "triton"])
def verify(request: pytest.FixtureRequest, device: torch.device, poisoned_empty: None) -> Verify:
    chosen = verify_block_torch if request.param == "torch" else triton_small_blocks

    def on_device(*arguments: torch.Tensor) -> Verdict:
        return Verdict(
            *(tensor.cpu() for tensor in chosen(*(argument.to(device) for argument in arguments)))
        )

    return on_device


def ids(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Round(NamedTuple):
    distribution: torch.Tensor  # [V] * (K + 1), of the round's tokens, filled up by the target
    accepted: float  # expected


def target_distribution(p: torch.Tensor, depth: int) -> torch.Tensor:
    """The joint distribution of `depth` + 1 tokens of a Markov target p [V + 1, V], whose last row
    is the start."""
    distribution, size = p[-1], p.shape[1]
    for _ in range(depth):
        distribution = distribution[..., None] * p[:size]
    return distribution


def enumerate_round(p: torch.Tensor, q: torch.Tensor, depth: int, *, block: bool = True) -> Round:
    """One round's distribution over all drafted paths, from the module's own reaches and stops; a
    chain's with `block` False."""
    size = p.shape[1]
    paths = torch.tensor(list(itertools.product(range(size), repeat=depth)))
    states = torch.nn.functional.pad(paths, (1, 0), value=size)
    log_p, log_q = p.log()[states], q.log()[states[:, :depth]]
    distribution = block_distribution(log_p, log_q, paths, torch.full((len(paths),), depth))
    drafted = log_q.gather(-1, paths[..., None]).sum(dim=1)[:, 0].exp()
    if block:
        stop = torch.cat([torch.ones(len(paths), 1), distribution.stop[:, 1:]], dim=1)
        chances = stop * torch.nn.functional.pad(
            (1 - stop).flip(1).cumprod(1).flip(1)[:, 1:], (0, 1), value=1.0
        )
        reach = distribution.log_reach
    else:
        ratio = (
            (log_p[:, :depth] - log_q)
            .gather(-1, paths[..., None])[..., 0]
            .exp()
            .clamp(max=1)
            .cumprod(1)
        )
        kept = torch.nn.functional.pad(ratio, (1, 0), value=1.0)
        chances = kept - torch.nn.functional.pad(kept[:, 1:], (0, 1))
        reach = torch.zeros_like(distribution.log_reach)
    total = torch.zeros((size,) * (depth + 1), dtype=p.dtype)
    for row, path in enumerate(paths.tolist()):
        for kept in range(depth + 1):
            chance = drafted[row] * chances[row, kept]
            if chance == 0:
                continue
            ends = log_p[row, kept]
            if kept < depth:
                ends = log_distribution(
                    residual_distribution(log_p[row, kept] + reach[row, kept], log_q[row, kept])
                )
            following = ends.exp()
            for _ in range(depth - kept):
                following = following[..., None] * p[:size]
            total[tuple(path[:kept])] += chance * following
    return Round(total, float((drafted[:, None] * chances * torch.arange(depth + 1)).sum()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_joint_distribution_is_the_targets(seed: int, depth: int) -> None:
    p, q = (normal(2 * seed + i, 4, 3, scale=1.5).double().softmax(-1) for i in range(2))
    exact = target_distribution(p, depth)
    by_block, by_chain = enumerate_round(p, q, depth), enumerate_round(p, q, depth, block=False)
    assert (by_block.distribution - exact).abs().max() < 1e-12 and (
        by_chain.distribution - exact
    ).abs().max() < 1e-12
    if depth == 1:
        assert by_block.accepted == pytest.approx(by_chain.accepted, abs=1e-12), (
            "one draft is a chain"
        )
    else:
        assert by_block.accepted > by_chain.accepted + 1e-4, "more drafts are kept more often"


def test_distributions_with_holes() -> None:
    p, q = (normal(seed, 5, 4, scale=1.5).double().softmax(-1) for seed in (7, 8))
    p[:, 0], q[:, 1], q[2] = 0, 0, p[2]
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    assert (enumerate_round(p, q, 3).distribution - target_distribution(p, 3)).abs().max() < 1e-12


def test_deterministic_drafts_come_to_a_chain() -> None:
    """One-hot distributions: the chance that at least i drafts stand is p(x_1) ... p(x_i)."""
    p = normal(9, 4, 6).double().softmax(-1)
    drafts = ids([2, 5, 1])
    one_hot = torch.full((1, 3, 6), -math.inf, dtype=torch.float64).scatter_(
        -1, drafts[..., None], 0.0
    )
    stop = block_distribution(p.log()[None], one_hot, drafts, ids(3)).stop[0]
    stands = 1 - torch.stack([(1 - stop[i:]).prod() for i in range(1, 4)])
    expected = p[:3].gather(-1, drafts.T)[:, 0].cumprod(0)
    torch.testing.assert_close(stands, expected, rtol=1e-12, atol=0)


def generations(p: torch.Tensor, q: torch.Tensor, rows: int, *, fresh: bool) -> torch.Tensor:
    """Four tokens [rows, 4] of a Markov pair by rounds of three drafts; `fresh` noise is the
    round's, else the request's."""
    size = p.shape[1]
    seeds = torch.arange(rows)
    tokens, counts = torch.full((rows, 9), size), torch.zeros(rows, dtype=torch.int64)
    while bool((counts < 4).any()):
        state = torch.where(
            counts > 0, tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0], size
        )
        noise = round_seeds(seeds, counts) if fresh else seeds
        states, drafts = [state], []
        for step in range(3):
            drafts.append(sample(q[states[-1]], noise, counts + step, Purpose.DRAFT))
            states.append(drafts[-1])
        visited = torch.stack(states, dim=1)
        verdict = verify_block(
            p[visited.flatten()],
            torch.stack(drafts, dim=1),
            torch.full((rows,), 3),
            q[visited[:, :3]],
            seeds,
            counts,
        )
        running = (counts < 4).nonzero()[:, 0]
        places = counts[running, None] + torch.arange(4)
        kept = torch.arange(4) <= verdict.accepted[running, None]
        tokens[running] = tokens[running].scatter(
            1, places, torch.where(kept, verdict.tokens[running], tokens[running].gather(1, places))
        )
        counts[running] += verdict.accepted[running] + 1
    return tokens[:, :4]


@pytest.mark.parametrize("fresh", [True, False])
def test_rounds_need_noise_of_their_own(fresh: bool) -> None:
    """With the request's own noise, what a block has rejected after looking at it would be drafted
    again."""
    p, q = normal(10, 5, 4, scale=1.5), normal(11, 5, 4, scale=1.5)
    tokens = generations(p, q, 60_000, fresh=fresh)
    cells = (tokens * torch.tensor([64, 16, 4, 1])).sum(dim=1)
    fit = g_test(
        torch.bincount(cells, minlength=256),
        target_distribution(p.double().softmax(-1), 3).flatten(),
    )
    assert (fit.p_value > FALSE_ALARM) == fresh


# Single rounds


def random_rounds(seed: int, rows: int, depth: int, size: int) -> tuple[torch.Tensor, ...]:
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
    drafts = torch.stack(
        [sample(q[:, i], noise, positions + i, Purpose.DRAFT) for i in range(depth)], dim=1
    )
    return p, drafts, lengths, q, seeds, positions


@pytest.mark.parametrize("size", [5, 49])
def test_triton_decides_as_the_reference(
    size: int, device: torch.device, poisoned_empty: None
) -> None:
    arguments = [tensor.to(device) for tensor in random_rounds(size, 8, 3, size)]
    arguments[1][3, 1] = -1
    reference, ours = verify_block_torch(*arguments), triton_small_blocks(*arguments)
    # The seeds are such that no draw lies within rounding of its threshold.
    assert torch.equal(ours.accepted, reference.accepted) and torch.equal(
        ours.tokens, reference.tokens
    )
    assert (reference.accepted > 1).any() and (reference.accepted < arguments[2]).any()


class Plain(NamedTuple):
    tokens: list[int]
    stands: list[bool]  # of each test
    by_chain: int  # the last token, had it been drawn from a chain's residual, max(p - q, 0)


def read_plainly(
    p: torch.Tensor, q: torch.Tensor, drafts: list[int], seed: int, position: int
) -> Plain:
    """One row as the module's first lines put it; p [k + 1, V] and q [k, V] are probabilities."""
    reach, reaches, stands = 1.0, [1.0], []
    for depth, token in enumerate(drafts, start=1):
        reach = min(reach * float(p[depth - 1, token] / q[depth - 1, token]), 1.0)
        reaches.append(reach)
        chance = reach
        if depth < len(drafts):
            mass = float((reach * p[depth] - q[depth]).clamp(min=0).sum())
            chance = mass / (mass + 1 - reach) if mass > 0 else 0.0
        stands.append(
            float(uniform(ids(seed), ids(position), Purpose.ACCEPT, ids(depth - 1))) < chance
        )
    kept = max((depth for depth, stood in enumerate(stands, start=1) if stood), default=0)
    rest, chains = p[kept], p[kept]
    if kept < len(drafts):
        rest, chains = ((scale * p[kept] - q[kept]).clamp(min=0) for scale in (reaches[kept], 1.0))
    purpose = Purpose.BONUS if kept == len(drafts) else Purpose.RESIDUAL
    last, by_chain = (
        int(sample(distribution.log()[None], ids(seed), ids(position + kept), purpose))
        for distribution in (rest, chains)
    )
    return Plain([*drafts[:kept], last], stands, by_chain)


def test_blocks_are_read_as_their_definition(verify: Verify) -> None:
    """Blocks of four, of which some stand after tests in their middle have failed and some end with
    reach below 1."""
    depth, size, rows = 4, 6, 600
    generator = torch.Generator().manual_seed(30)
    p = torch.randn(rows, depth + 1, size, generator=generator)
    q = 0.5 * p[:, :depth] + torch.randn(rows, depth, size, generator=generator)
    seeds, positions = torch.arange(rows) * 17, torch.arange(rows)
    noise = round_seeds(seeds, positions)
    drafts = torch.stack(
        [sample(q[:, i], noise, positions + i, Purpose.DRAFT) for i in range(depth)], dim=1
    )
    distributions = p.double().softmax(-1), q.double().softmax(-1)
    plain = [
        read_plainly(
            *(distribution[row] for distribution in distributions),
            drafts[row].tolist(),
            int(seeds[row]),
            int(positions[row]),
        )
        for row in range(rows)
    ]
    middles = [
        row
        for row, (tokens, stood, _) in enumerate(plain)
        if len(tokens) > 2 and not all(stood[: len(tokens) - 1])
    ]
    scaled = [row for row, (tokens, _, by_chain) in enumerate(plain) if tokens[-1] != by_chain]
    chosen = torch.tensor([*middles[:6], *scaled[:6], *range(4)])
    assert len(chosen) == 16
    full = torch.full((16,), depth)
    verdict = verify(
        p[chosen].flatten(0, 1), drafts[chosen], full, q[chosen], seeds[chosen], positions[chosen]
    )
    expected = [
        plain[row].tokens + [-1] * (depth + 1 - len(plain[row].tokens)) for row in chosen.tolist()
    ]
    assert verdict.tokens.tolist() == expected


def test_one_draft_or_deterministic_ones_are_a_chain(verify: Verify) -> None:
    p, drafts, lengths, q, seeds, positions = random_rounds(20, 6, 1, 40)
    block, chain = (
        verify(p, drafts, lengths, q, seeds, positions),
        verify_chain_torch(p, drafts, lengths, q, seeds, positions),
    )
    assert torch.equal(block.tokens, chain.tokens)
    p, drafts, lengths, _, seeds, positions = random_rounds(21, 12, 3, 40)
    assert torch.equal(
        verify_block(p, drafts, lengths, None, seeds, positions).tokens,
        verify_chain(p, drafts, lengths, None, seeds, positions).tokens,
    )


def test_a_token_that_its_distribution_could_not_have_drawn_ends_the_block(verify: Verify) -> None:
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
    assert (
        verdict.accepted.tolist() == [1] * rows
        and verdict.tokens.tolist() == [[4, drawn, -1]] * rows
    )


def test_broken_targets_are_survived(verify: Verify) -> None:
    p, q = normal(24, 6, 19), normal(25, 3, 1, 19)
    p[0:2], p[2, 1:], p[4, 3] = math.nan, math.nan, -math.inf
    verdict = verify(p, ids([3], [3], [3]), ids(1, 1, 1), q, ids(0, 1, 2), ids(0, 0, 0))
    assert verdict.accepted.tolist() == [0, 0, 0]
    assert verdict.tokens[:2].tolist() == [[-1, -1], [0, -1]] and verdict.tokens[2, 0] not in (
        -1,
        3,
    )


def test_rows_without_drafts_among_others(verify: Verify) -> None:
    p, drafts, _, q, seeds, positions = random_rounds(26, 4, 2, 40)
    lengths = ids(0, 2, 0, 1)
    p = normal(27, 7, 40)
    verdict = verify(p, drafts, lengths, q, seeds, positions)
    assert (verdict.tokens.ge(0).sum(1) == verdict.accepted + 1).all() and (
        verdict.accepted <= lengths
    ).all()
    assert verdict.tokens[0, 0] == sample(p[:1], seeds[:1], positions[:1], Purpose.BONUS)
    nothing = ids()
    assert verify(
        torch.zeros(0, 9), nothing.view(0, 3), nothing, torch.zeros(0, 3, 9), nothing, nothing
    ).tokens.shape == (0, 4)


@pytest.mark.parametrize(
    "dtype, size", [(torch.bfloat16, 7), (torch.bfloat16, 130), (torch.float16, 45)]
)
def test_narrow_and_strided_logits_are_read_as_they_are(
    verify: Verify, dtype: torch.dtype, size: int
) -> None:
    p, drafts, lengths, q, seeds, positions = random_rounds(28, 3, 2, size)
    p, q = p.to(dtype), q.to(dtype)
    wide_p, wide_q = (
        torch.zeros(len(p), size + 15, dtype=dtype),
        torch.zeros(3, 4, size + 15, dtype=dtype),
    )
    own = slice(3, size + 3)
    wide_p[:, own], wide_q[:, 1:3, own] = p, q
    narrow = verify(wide_p[:, own], drafts, lengths, wide_q[:, 1:3, own], seeds, positions)
    assert torch.equal(
        narrow.tokens, verify(p.float(), drafts, lengths, q.float(), seeds, positions).tokens
    )


def test_a_row_does_not_depend_on_its_batch() -> None:
    p, drafts, lengths, q, seeds, positions = random_rounds(29, 25, 3, 40)
    together = verify_block(p, drafts, lengths, q, seeds, positions)
    begin = 0
    for row in range(25):
        one, length = slice(row, row + 1), int(lengths[row])
        distribution = p[begin : begin + length + 1]
        shorter = verify_block(
            distribution,
            drafts[one, :length],
            lengths[one],
            q[one, :length],
            seeds[one],
            positions[one],
        )
        assert torch.equal(shorter.tokens[0], together.tokens[row, : length + 1])
        begin += length + 1


@pytest.mark.long
@pytest.mark.parametrize("impl", ["torch", "triton"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_invariants(impl: str, data: st.DataObject) -> None:
    """Length, prefix, mask, range and determinism, for any logits hypothesis can think of."""
    size, depth, rows = (
        data.draw(st.integers(1, 9)),
        data.draw(st.integers(0, 3)),
        data.draw(st.integers(1, 3)),
    )
    number = st.one_of(
        st.floats(-40, 40, width=32), st.sampled_from([math.nan, -math.inf, math.inf])
    )

    def distribution(*shape: int) -> torch.Tensor:
        count = math.prod(shape)
        return torch.tensor(
            data.draw(st.lists(number, min_size=count, max_size=count)), dtype=torch.float32
        ).view(shape)

    lengths = ids(*(data.draw(st.integers(0, depth)) for _ in range(rows)))
    p, q = distribution(int((lengths + 1).sum()), size), distribution(rows, depth, size)
    drafts = ids(*(data.draw(st.integers(-1, size - 1)) for _ in range(rows * depth))).view(
        rows, depth
    )
    seeds = ids(*(data.draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(rows)))
    arguments = [tensor.to(DEVICE) for tensor in (p, drafts, lengths, q, seeds, torch.arange(rows))]
    verdict, again = (verify_block(*arguments, impl=impl) for _ in range(2))
    assert torch.equal(verdict.tokens, again.tokens) and torch.equal(
        verdict.accepted, again.accepted
    )
    first = 0
    for row in range(rows):
        kept, tokens = int(verdict.accepted[row]), verdict.tokens[row].tolist()
        assert 0 <= kept <= lengths[row] and tokens[:kept] == drafts[row, :kept].tolist()
        assert tokens[kept + 1 :] == [-1] * (depth - kept)
        for place in range(kept + 1):
            mass = torch.nan_to_num(p[first + place], nan=-math.inf, posinf=1.0, neginf=-math.inf)
            if tokens[place] < 0:
                assert place == kept and (mass == -math.inf).all()
            else:
                assert tokens[place] < size and mass[tokens[place]] > -math.inf
        first += int(lengths[row]) + 1
