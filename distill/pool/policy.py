"""Policy for drafts of request classes: begin, serve, merge, stop, retire. Pure.

A class that is frequent begins to learn: a candidate is trained on its requests alone and compared
with the live draft by the gate. Once it wins it drafts for the class. A class is given up when its
draft is no better any more, when it learns too long in vain, or when its requests are gone; it does
not learn again for a while, so that others get their turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from draftsmith.distill.config import PoolConfig

# Learning is in vain after so many times the requests that begin it.
PATIENCE = 8

MoveKind = Literal["learn", "serve", "merge", "stop", "retire"]


class PoolMove(NamedTuple):
    kind: MoveKind
    name: str  # of the class
    reason: str


class PoolMember(NamedTuple):
    """Class with a draft, as the policy needs it."""

    name: str
    is_serving: bool  # else it only learns
    has_won: bool  # the gate found a candidate better than the live draft
    is_no_better: bool  # any more, with evidence
    requests: int  # of the class, since it began to learn
    summary: str  # the numbers, for people


@dataclass
class ClassTraffic:
    """Classes of the latest requests, "" where one has none, and those that were given up
    lately."""

    window: int
    latest: list[str] = field(default_factory=list)
    num_seen: int = 0
    given_up: dict[str, int] = field(default_factory=dict)  # class -> `num_seen` then

    def observe(self, name: str) -> None:
        self.num_seen += 1
        self.latest = [*self.latest, name][-self.window :]
        self.given_up = {
            one: at for one, at in self.given_up.items() if self.num_seen - at < self.window
        }

    def leave_out(self, names: Iterable[str]) -> None:
        """Drops names that mean something else from now on."""
        gone = set(names)
        self.latest = ["" if name in gone else name for name in self.latest]
        self.given_up = {name: at for name, at in self.given_up.items() if name not in gone}

    def widened(self, window: int) -> ClassTraffic:
        """The same with another window."""
        return replace(self, window=window, latest=self.latest[-window:])


def resolved(config: PoolConfig, num_members: int) -> PoolConfig:
    """Options with a number for `most`, by default the classes that there are."""
    return replace(config, most=num_members) if config.most is None else config


def moves(
    members: Sequence[PoolMember], traffic: ClassTraffic, config: PoolConfig
) -> list[PoolMove]:
    """Moves, at most one per member. A free slot is filled at the next look, by the most frequent
    class that waits."""
    assert config.most is not None
    counts = Counter(traffic.latest)
    kept = members[: config.most]
    found = [
        move
        for member in kept
        if (move := move_of(member, counts[member.name], traffic, config)) is not None
    ]
    found += [
        PoolMove("retire", member.name, f"pool.most is {config.most}")
        for member in members[config.most :]
    ]
    out = {"", *traffic.given_up, *(member.name for member in members)}
    waiting = [
        (name, count)
        for name, count in counts.most_common()
        if count >= config.requests and name not in out
    ]
    free = max(0, config.most - len(members))
    return found + [
        PoolMove("learn", name, f"{count} of the latest {len(traffic.latest)} requests")
        for name, count in waiting[:free]
    ]


def move_of(
    member: PoolMember, count: int, traffic: ClassTraffic, config: PoolConfig
) -> PoolMove | None:
    name = member.name
    if not count and len(traffic.latest) == traffic.window:
        return PoolMove("retire", name, f"none of the latest {traffic.window} requests")
    if member.is_serving:
        return PoolMove("merge", name, member.summary) if member.is_no_better else None
    if member.has_won:
        return PoolMove("serve", name, member.summary)
    if member.requests >= PATIENCE * config.requests:
        return PoolMove("stop", name, f"no better draft after {member.requests} requests")
    return None
