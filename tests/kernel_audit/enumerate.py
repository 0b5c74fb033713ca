"""Every outcome of one round of the kernels themselves, with its probability, in float64.

The drafts of a round are enumerated with their chances. For each of them the verification as it
ships is called with chosen uniforms, and its last draw is replaced by the distribution that it
would have been made from. What a uniform decides changes at most once as it grows (a test is passed
below some value and failed above it); where, is found by asking the kernel. So the uniforms fall
into boxes, one for each combination of passed and failed tests, and the distribution of the round
is a finite sum.

Legend: N drafts, K depth, M numbers of one position, C boxes, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from draftsmith.kernels.verify.verdict import TreeVerdict, Verdict
from tests.kernel_audit.world import START, World

PARTS, SEARCHES = 16, 14  # a border is searched by so many parts of what is left, so often: 2^-56
ROUNDING = 1e-15  # within which borders of different rows are one
SAME = 1e-9  # difference of a probability that counts as none
LOWEST, HIGHEST = 1e-300, 1 - 2.0**-53
SLIVER = 1e-14  # boxes thinner than it are rounding and are left out
# where in a box the kernel is asked; the first decides, the others must agree
INSIDE = (0.5, 1e-3, 1 - 1e-3)


class Chosen:
    """Draws (see `randomness.Draws`) that take row b's uniforms from a table [C, K, M] and keep
    what the token is drawn from.

    Rows are distinguished by their seeds, which are their numbers; positions begin at 0.
    """

    def __init__(self, uniforms: torch.Tensor):
        self.uniforms = uniforms
        self.probs = torch.empty(0)

    def uniform(
        self, seeds: torch.Tensor, positions: torch.Tensor, numbers: torch.Tensor | None = None
    ) -> torch.Tensor:
        numbers = torch.zeros_like(positions) if numbers is None else numbers.clamp(min=0)
        return self.uniforms[seeds, positions, numbers]

    def token(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        purposes: torch.Tensor,
    ) -> torch.Tensor:
        self.probs = logits.double().softmax(dim=-1)
        return torch.zeros_like(seeds)


class Drafts(NamedTuple):
    """All that may be drafted from the start of a world, as nodes of one shape, and how probable
    each is."""

    parents: Sequence[int]
    tokens: torch.Tensor  # [N, nodes]; -1 where the draft's distribution has no more tokens
    contexts: torch.Tensor  # [N, nodes + 1], of the root and of each node
    chances: torch.Tensor  # [N]


class Outcome(NamedTuple):
    accepted: torch.Tensor  # [C]
    tokens: torch.Tensor  # [C, nodes + 1]: the kept drafts, 0, then -1
    probs: torch.Tensor  # [C, V], what the token after the kept drafts is drawn from

    def at(self, rows: torch.Tensor) -> Outcome:
        return Outcome(*(tensor[rows] for tensor in self))


Decide = Callable[[torch.Tensor, Chosen], Verdict | TreeVerdict]  # of drafts [C] by their numbers


def all_drafts(world: World, parents: Sequence[int], *, deterministic: bool) -> Drafts:
    """Siblings are ordered draws without replacement, or the likeliest tokens where drafting is
    `deterministic`."""
    q = world.q_logits.double().softmax(dim=-1)
    drafts: list[tuple[list[int], list[int], float]] = [([-1] * len(parents), [START], 1.0)]
    for slot in range(len(parents) + 1):
        children = [node for node, parent in enumerate(parents) if parent + 1 == slot]
        drafts = [
            (_placed(tokens, children, drawn), contexts, chance * each)
            for tokens, contexts, chance in drafts
            for drawn, each in _ordered(q[contexts[slot]], len(children), deterministic)
        ]
        if slot < len(parents):
            # A node's own token is settled by now: parents come before children.
            drafts = [
                (
                    tokens,
                    [*contexts, _after(world, contexts[parents[slot] + 1], tokens[slot])],
                    chance,
                )
                for tokens, contexts, chance in drafts
            ]
    tokens, contexts, chances = zip(*drafts)
    return Drafts(
        parents,
        torch.tensor(tokens),
        torch.tensor(contexts),
        torch.tensor(chances, dtype=torch.float64),
    )


def round_distribution(
    world: World, drafts: Drafts, decide: Decide, *, depth: int, numbers: tuple[int, int]
) -> torch.Tensor:
    """The distribution [V] * (depth + 1) of a round's tokens, those that it leaves open filled up
    by the target.

    `numbers` is the shape (K, M) of the uniforms that a round may ask for. NaN where one changes
    the outcome more than once.
    """
    rows, lows, highs = _boxes(decide, len(drafts.chances), numbers)
    outcome = _ask(decide, rows, lows + INSIDE[0] * (highs - lows))
    for share in INSIDE[1:]:
        if bool(_differs(outcome, _ask(decide, rows, lows + share * (highs - lows))).any()):
            return torch.full((world.vocab_size,) * (depth + 1), torch.nan, dtype=torch.float64)
    weights = drafts.chances[rows] * (highs - lows).flatten(1).prod(dim=1)
    ends: dict[tuple[int, ...], torch.Tensor] = {}
    for accepted, tokens, weighted in zip(
        outcome.accepted.tolist(), outcome.tokens.tolist(), weights[:, None] * outcome.probs
    ):
        path = tuple(tokens[:accepted])
        ends[path] = ends.get(path, torch.zeros_like(weighted)) + weighted
    distribution = torch.zeros((world.vocab_size,) * (depth + 1), dtype=torch.float64)
    for path, weighted in ends.items():
        distribution[path] += _filled(world, weighted, path, depth - len(path))
    return distribution


def target_distribution(world: World, context: int, length: int) -> torch.Tensor:
    """[V] * length: the target's distribution of the next tokens."""
    p = world.p_logits[context].double().softmax(dim=-1)
    if length <= 1:
        return p if length else torch.ones((), dtype=torch.float64)
    after = [_after(world, context, token) for token in range(world.vocab_size)]
    return torch.stack(
        [
            p[token] * target_distribution(world, after[token], length - 1)
            for token in range(world.vocab_size)
        ]
    )


def _boxes(
    decide: Decide, count: int, numbers: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(draft [C], lower and upper ends [C, K, M] of the uniforms) of the boxes within which nothing
    changes."""
    rows = torch.arange(count)
    lows = torch.zeros(count, *numbers, dtype=torch.float64)
    highs = torch.ones_like(lows)
    for place in itertools.product(*(range(size) for size in numbers)):
        # Numbers not yet looked at fail their tests, so that this one is not hidden behind them.
        asked = torch.where((lows == 0) & (highs == 1), HIGHEST, (lows + highs) / 2)
        outcomes, at = [], (slice(None), *place)
        for end in (LOWEST, HIGHEST):
            asked[at] = end
            outcomes.append(_ask(decide, rows, asked))
        split = _differs(*outcomes).nonzero()[:, 0]
        if not len(split):
            continue
        passed, failed = (outcome.at(split) for outcome in outcomes)
        borders = _borders(decide, rows[split], asked[split], place, (passed, failed))
        wide = (borders > SLIVER) & (borders < 1 - SLIVER)
        split, borders, whole = split[wide], borders[wide], len(rows)
        rows, lows, highs = (torch.cat([tensor, tensor[split]]) for tensor in (rows, lows, highs))
        below, above = (split, *place), (torch.arange(whole, len(rows)), *place)
        highs[below] = lows[above] = borders
    return rows, lows, highs


def _borders(
    decide: Decide,
    rows: torch.Tensor,
    uniforms: torch.Tensor,
    place: tuple[int, ...],
    ends: tuple[Outcome, Outcome],
) -> torch.Tensor:
    """[C]: the value of the uniform at `place` where the outcome at `LOWEST` turns into that at
    `HIGHEST`.

    Rows of like outcomes mostly have one border in common: one of them is searched, the others are
    asked on both sides of it.
    """
    passed, failed = ends
    _, groups = torch.unique(
        torch.cat([passed.tokens, (failed.probs * 1e9).round()], dim=1), dim=0, return_inverse=True
    )
    first = torch.full((int(groups.max()) + 1,), len(rows)).scatter_reduce(
        0, groups, torch.arange(len(rows)), "amin"
    )
    borders = _search(decide, rows[first], uniforms[first], place, passed.at(first))[groups]
    alike, at = torch.ones(len(rows), dtype=torch.bool), (slice(None), *place)
    for side, outcome in ((-ROUNDING, passed), (ROUNDING, failed)):
        uniforms[at] = (borders + side).clamp(LOWEST, HIGHEST)
        alike &= ~_differs(outcome, _ask(decide, rows, uniforms))
    others = (~alike).nonzero()[:, 0]
    if len(others):
        borders[others] = _search(decide, rows[others], uniforms[others], place, passed.at(others))
    return borders


def _search(
    decide: Decide,
    rows: torch.Tensor,
    uniforms: torch.Tensor,
    place: tuple[int, ...],
    passed: Outcome,
) -> torch.Tensor:
    """[C]: below which value of the uniform at `place` the outcome is the `passed` one; `PARTS` - 1
    values at a time."""
    low, high = (
        torch.zeros(len(rows), dtype=torch.float64),
        torch.ones(len(rows), dtype=torch.float64),
    )
    each = torch.arange(len(rows)).repeat_interleave(PARTS - 1)
    asked, expected, at = uniforms[each], passed.at(each), (slice(None), *place)
    for _ in range(SEARCHES):
        steps = low[:, None] + (high - low)[:, None] * torch.arange(PARTS + 1) / PARTS
        asked[at] = steps[:, 1:-1].flatten()
        stands = ~_differs(expected, _ask(decide, rows[each], asked))
        passes = stands.view(len(rows), -1).sum(dim=1, keepdim=True)
        low, high = steps.gather(1, passes)[:, 0], steps.gather(1, passes + 1)[:, 0]
    return high


def _ask(decide: Decide, rows: torch.Tensor, uniforms: torch.Tensor) -> Outcome:
    draws = Chosen(uniforms)
    verdict = decide(rows, draws)
    return Outcome(verdict.accepted, verdict.tokens, draws.probs)


def _differs(one: Outcome, other: Outcome) -> torch.Tensor:
    """[C]: whether other tokens are kept, or the next one comes from another distribution."""
    return (one.tokens != other.tokens).any(dim=1) | ((one.probs - other.probs).abs() > SAME).any(
        dim=1
    )


def _ordered(q: torch.Tensor, count: int, deterministic: bool) -> list[tuple[list[int], float]]:
    """All ordered draws of `count` different tokens with their chances; a distribution with fewer
    gives as many as it has."""
    if deterministic:
        return [(q.topk(count).indices.tolist(), 1.0)]
    possible = [token for token, chance in enumerate(q.tolist()) if chance > 0]
    draws = []
    for tokens in itertools.permutations(possible, min(count, len(possible))):
        chance, left = 1.0, 1.0
        for token in tokens:
            chance, left = chance * float(q[token]) / left, left - float(q[token])
        draws.append((list(tokens), chance))
    return draws


def _placed(tokens: list[int], children: Sequence[int], drawn: Sequence[int]) -> list[int]:
    placed = list(tokens)
    for child, token in zip(children, drawn):
        placed[child] = token
    return placed


def _filled(
    world: World, distribution: torch.Tensor, path: Sequence[int], more: int
) -> torch.Tensor:
    """[V] * (1 + more): a token of `distribution` behind `path`, then `more` of the target's."""
    context = START
    for token in path:
        context = _after(world, context, token)
    return torch.stack(
        [
            distribution[token] * target_distribution(world, _after(world, context, token), more)
            for token in range(world.vocab_size)
        ]
    )


def _after(world: World, context: int, token: int) -> int:
    return int(world.after(torch.tensor(context), torch.tensor(token)))
