"""When a class of requests gets a draft of its own, keeps it, and gives it up. Pure.

A class that is frequent is tried: a draft learns from its traffic alone and is held against the live draft. It serves the class
once it is better with evidence; it is given up when it is not better by `gate.gain`, with evidence, when its trial lasts too
long, or when the class has left. A class that was given up is not tried again for a while, so that others get their turn.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from draftsmith.distill.config import PoolConfig

# A trial ends after so many looks at new held-out requests without evidence.
MOST_LOOKS = 24

MoveKind = Literal["try", "new", "merge", "drop", "retire"]


class Move(NamedTuple):
    kind: MoveKind
    name: str  # of the class
    reason: str


class Member(NamedTuple):
    """A class with a draft, as the policy sees it."""

    name: str
    is_serving: bool  # not on trial
    is_better: bool  # than the live draft, with evidence
    is_no_better: bool  # with evidence
    looks: int
    told: str  # the numbers, for people


@dataclass
class ClassTraffic:
    """The classes of the latest requests, "" where one has none, and which were given up lately."""

    window: int
    latest: deque[str] = field(default_factory=deque)
    num_seen: int = 0
    given_up: dict[str, int] = field(default_factory=dict)  # class -> `num_seen` then

    def observe(self, name: str) -> None:
        self.num_seen += 1
        self.latest.append(name)
        while len(self.latest) > self.window:
            self.latest.popleft()
        self.given_up = {one: at for one, at in self.given_up.items() if self.num_seen - at < self.window}

    def leave_out(self, names: Iterable[str]) -> None:
        """Names that mean something else from now on."""
        gone = set(names)
        self.latest = deque("" if name in gone else name for name in self.latest)
        self.given_up = {name: at for name, at in self.given_up.items() if name not in gone}

    def to_dict(self) -> dict[str, Any]:
        return {"latest": list(self.latest), "num_seen": self.num_seen, "given_up": self.given_up}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, window: int) -> ClassTraffic:
        return cls(window, deque(values["latest"][-window:]), values["num_seen"], dict(values["given_up"]))


def moves(members: Sequence[Member], traffic: ClassTraffic, config: PoolConfig) -> list[Move]:
    """At most one a member; a place that is given up is filled at the next look, by the most frequent class that waits."""
    counts = Counter(traffic.latest)
    found = [move for member in members if (move := move_of(member, counts[member.name], traffic)) is not None]
    out = {"", *traffic.given_up, *(member.name for member in members)}
    waiting = [(name, count) for name, count in counts.most_common() if count >= config.requests and name not in out]
    free = max(0, config.most - len(members))
    return found + [Move("try", name, f"{count} of the latest {len(traffic.latest)} requests") for name, count in waiting[:free]]


def move_of(member: Member, count: int, traffic: ClassTraffic) -> Move | None:
    name = member.name
    if not count and len(traffic.latest) == traffic.window:
        return Move("retire", name, f"none of the latest {traffic.window} requests")
    if member.is_serving:
        return Move("merge", name, member.told) if member.is_no_better else None
    if member.is_better:
        return Move("new", name, member.told)
    if member.is_no_better or member.looks >= MOST_LOOKS:
        return Move("drop", name, member.told)
    return None
