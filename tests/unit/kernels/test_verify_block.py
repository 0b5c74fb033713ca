"""Block verification: exact laws by enumeration, joint laws over whole generations, edge cases; on reference and Triton."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from draftsmith.kernels.randomness import Purpose, round_seeds, sample
from draftsmith.kernels.statistics import g_test
from draftsmith.kernels.verify import Verdict, log_law, residual_law, verify_chain
from draftsmith.kernels.verify_block import block_law, verify_block, verify_block_torch

Verify = Callable[..., Verdict]
FALSE_ALARM = 1e-6  # seeds are fixed, so that a test passes or fails for good


def triton_small_blocks(*arguments: torch.Tensor) -> Verdict:
    """Blocks of 16 tokens, so that small vocabularies have several."""
    from draftsmith.kernels.verify_block_triton import verify_block_triton

    return verify_block_triton(*arguments, block=16)


@pytest.fixture(params=["torch", "triton"])
def verify(request: pytest.FixtureRequest, device: torch.device, poisoned_empty: None) -> Verify:
    chosen = verify_block_torch if request.param == "torch" else triton_small_blocks

    def on_device(*arguments: torch.Tensor) -> Verdict:
        return Verdict(*(tensor.cpu() for tensor in chosen(*(argument.to(device) for argument in arguments))))

    return on_device


def ids(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Round(NamedTuple):
    law: torch.Tensor  # [V] * (K + 1), of the round's tokens, filled up by the target
    accepted: float  # expected


def target_law(p: torch.Tensor, depth: int) -> torch.Tensor:
    """The joint law of `depth` + 1 tokens of a Markov target p [V + 1, V], whose last row is the start."""
    law, size = p[-1], p.shape[1]
    for _ in range(depth):
        law = law[..., None] * p[:size]
    return law


def enumerate_round(p: torch.Tensor, q: torch.Tensor, depth: int, *, block: bool = True) -> Round:
    """One round's law over all drafted paths, from the module's own reaches and stops; a chain's with `block` False."""
    size = p.shape[1]
    paths = torch.tensor(list(itertools.product(range(size), repeat=depth)))
    states = torch.nn.functional.pad(paths, (1, 0), value=size)
    log_p, log_q = p.log()[states], q.log()[states[:, :depth]]
    law = block_law(log_p, log_q, paths, torch.full((len(paths),), depth))
    drafted = log_q.gather(-1, paths[..., None]).sum(dim=1)[:, 0].exp()
    if block:
        stop = torch.cat([torch.ones(len(paths), 1), law.stop[:, 1:]], dim=1)
        chances = stop * torch.nn.functional.pad((1 - stop).flip(1).cumprod(1).flip(1)[:, 1:], (0, 1), value=1.0)
        reach = law.log_reach
    else:
        ratio = (log_p[:, :depth] - log_q).gather(-1, paths[..., None])[..., 0].exp().clamp(max=1).cumprod(1)
        kept = torch.nn.functional.pad(ratio, (1, 0), value=1.0)
        chances = kept - torch.nn.functional.pad(kept[:, 1:], (0, 1))
        reach = torch.zeros_like(law.log_reach)
    total = torch.zeros((size,) * (depth + 1), dtype=p.dtype)
    for row, path in enumerate(paths.tolist()):
        for kept in range(depth + 1):
            chance = drafted[row] * chances[row, kept]
            if chance == 0:
                continue
            ends = log_p[row, kept]
            if kept < depth:
                ends = log_law(residual_law(log_p[row, kept] + reach[row, kept], log_q[row, kept]))
            following = ends.exp()
            for _ in range(depth - kept):
                following = following[..., None] * p[:size]
            total[tuple(path[:kept])] += chance * following
    return Round(total, float((drafted[:, None] * chances * torch.arange(depth + 1)).sum()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_joint_law_is_the_targets(seed: int, depth: int) -> None:
    p, q = (normal(2 * seed + i, 4, 3, scale=1.5).double().softmax(-1) for i in range(2))
    exact = target_law(p, depth)
    by_block, by_chain = enumerate_round(p, q, depth), enumerate_round(p, q, depth, block=False)
    assert (by_block.law - exact).abs().max() < 1e-12 and (by_chain.law - exact).abs().max() < 1e-12
    if depth == 1:
        assert by_block.accepted == pytest.approx(by_chain.accepted, abs=1e-12), "one draft is a chain"
    else:
        assert by_block.accepted > by_chain.accepted + 1e-4, "more drafts are kept more often"


def test_laws_with_holes() -> None:
    p, q = (normal(seed, 5, 4, scale=1.5).double().softmax(-1) for seed in (7, 8))
    p[:, 0], q[:, 1], q[2] = 0, 0, p[2]
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    assert (enumerate_round(p, q, 3).law - target_law(p, 3)).abs().max() < 1e-12


def test_deterministic_drafts_come_to_a_chain() -> None:
    """One-hot laws: the chance that at least i drafts stand is p(x_1) ... p(x_i)."""
    p = normal(9, 4, 6).double().softmax(-1)
    drafts = ids([2, 5, 1])
    one_hot = torch.full((1, 3, 6), -math.inf, dtype=torch.float64).scatter_(-1, drafts[..., None], 0.0)
    stop = block_law(p.log()[None], one_hot, drafts, ids(3)).stop[0]
    stands = 1 - torch.stack([(1 - stop[i:]).prod() for i in range(1, 4)])
    expected = p[:3].gather(-1, drafts.T)[:, 0].cumprod(0)
    torch.testing.assert_close(stands, expected, rtol=1e-12, atol=0)


def generations(p: torch.Tensor, q: torch.Tensor, rows: int, *, fresh: bool) -> torch.Tensor:
    """Four tokens [rows, 4] of a Markov pair by rounds of three drafts each; `fresh` noise is of the round, else of the request."""
    size = p.shape[1]
    seeds = torch.arange(rows)
    tokens, counts = torch.full((rows, 9), size), torch.zeros(rows, dtype=torch.int64)
    while bool((counts < 4).any()):
        state = torch.where(counts > 0, tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0], size)
        noise = round_seeds(seeds, counts) if fresh else seeds
        states, drafts = [state], []
        for step in range(3):
            drafts.append(sample(q[states[-1]], noise, counts + step, Purpose.DRAFT))
            states.append(drafts[-1])
        visited = torch.stack(states, dim=1)
        verdict = verify_block(
            p[visited.flatten()], torch.stack(drafts, dim=1), torch.full((rows,), 3), q[visited[:, :3]], seeds, counts
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
    """With the request's own noise, what a block has rejected after looking at it would be drafted again."""
    p, q = normal(10, 5, 4, scale=1.5), normal(11, 5, 4, scale=1.5)
    tokens = generations(p, q, 60_000, fresh=fresh)
    cells = (tokens * torch.tensor([64, 16, 4, 1])).sum(dim=1)
    fit = g_test(torch.bincount(cells, minlength=256), target_law(p.double().softmax(-1), 3).flatten())
    assert (fit.p_value > FALSE_ALARM) == fresh
