"""Depth in its round at which each sampled token was decided.

A token's depth is one more than the drafts kept before it in its round, which is settled before the
token is drawn. So tokens of one depth have the target's distribution, each given its own prefix, if
speculation is right. (Those of one fate, drafts that were kept for example, would not.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from draftsmith.errors import UserError
from draftsmith.serve.audit.samples import Samples

# the first token after a prompt, and rounds without drafts; 1, 2, ... are drafted depths
UNDRAFTED = 0
BONUS = -1  # all drafts of the round were kept
UNKNOWN = -2  # the server does not report it
NAMES = {
    UNDRAFTED: "tokens without drafts",
    BONUS: "bonus tokens",
    UNKNOWN: "tokens after the first",
}


def group_name(depth: int) -> str:
    return NAMES.get(depth) or f"tokens at drafted depth {depth}"


def wanted_depths(k: int | None) -> list[int]:
    """Depths of rounds of k drafts; none where k is not known."""
    return [*range(1, k + 1), BONUS] if k else []


@dataclass(frozen=True)
class Depths:
    """Depths of all sampled tokens, by context, continuation and position."""

    nested: list[list[list[int]]]
    reported: bool  # by the server
    offered: int = 0  # draft tokens of all rounds
    deepest: int = 0  # the most that a round offered

    @property
    def flat(self) -> list[int]:
        return list(chain.from_iterable(chain.from_iterable(self.nested)))


def depths_of(samples: Sequence[Samples], k: int | None) -> Depths:
    reports = [report for each in samples for report in each.reports]
    if not reports or any(report is None or "per_step_begin" not in report for report in reports):
        return Depths(
            [[unknown_depths(len(tokens)) for tokens in each.tokens] for each in samples],
            reported=False,
        )
    nested = [
        [
            reported_depths(report or {}, len(tokens), k)
            for tokens, report in zip(each.tokens, each.reports, strict=True)
        ]
        for each in samples
    ]
    offered = [
        count for report in reports if report is not None for count in report["per_step_drafted"]
    ]
    return Depths(nested, reported=True, offered=sum(offered), deepest=max(offered, default=0))


def reported_depths(report: dict[str, Any], count: int, k: int | None = None) -> list[int]:
    """Depth of each of an answer's `count` tokens, from the server's report of its rounds. No round
    keeps more than k drafts, though one with a draft tree offers more.

    Raises:
        UserError: a report without its rounds.
    """
    try:
        rounds = list(
            zip(
                report["per_step_begin"],
                report["per_step_drafted"],
                report["per_step_committed"],
                strict=True,
            )
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the server's report of an answer lacks its rounds ({error}); audit a server of this "
            "version"
        ) from error
    depths = [UNDRAFTED] * count
    for begin, offered, committed in rounds:
        deepest = offered if k is None else min(offered, k)
        for step in range(committed):
            if begin + step < count:
                depths[begin + step] = step + 1 if step < deepest else BONUS
    return depths


def unknown_depths(count: int) -> list[int]:
    return [UNDRAFTED] + [UNKNOWN] * (count - 1)


def depth_shares(drafts: int, accepted: Sequence[int], num_tokens: int) -> dict[int, float]:
    """Share of `num_tokens` tokens that were decided at each depth, by a server's counters of the
    same time: the number of rounds that drafted, and the drafts accepted at each position."""
    reached = dict(enumerate([drafts, *accepted[:-1]], 1)) | (
        {BONUS: accepted[-1]} if accepted else {}
    )
    return {depth: min(1.0, count / max(num_tokens, 1)) for depth, count in reached.items()}
