"""`rollout.json`: a candidate that is tried on a part of the engines, and the version that each
engine should serve meanwhile.

Engines of the part change between the candidate and the live version in time. Two periods of
`switch_s` make a pair, and a hash decides which of its halves has the candidate. The order is
therefore random in every pair of every engine, whatever the time of day or the requests that a
router sends there.

A rollout holds only under the live version that it began with: one put of `current` ends it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from draftsmith.fleet.store.layout import StoreError, parse_json

SCHEMA_VERSION = 1


class Period(NamedTuple):
    """One half of a pair of periods."""

    pair: int
    half: int  # 0 or 1
    begin_s: float


@dataclass(frozen=True, kw_only=True)
class Rollout:
    candidate: int
    live: int
    # engines whose hash lies at most there
    cut: float
    stages: tuple[float, ...]
    stage: int = 0
    switch_s: float = 600.0
    begun_s: float = 0.0  # of the stage, in seconds since 1970
    # evidence of the stage and decisions so far, which engines do not read
    trial: Mapping[str, Any] = field(default_factory=dict)
    decisions: tuple[Mapping[str, Any], ...] = ()
    is_over: bool = False

    def to_json(self) -> bytes:
        return (json.dumps({"schema": SCHEMA_VERSION, **asdict(self)}) + "\n").encode()

    def has(self, engine: str) -> bool:
        """True for an engine of the part that tries the candidate."""
        return place_of(engine, self.candidate) <= self.cut

    def period(self, at_s: float) -> Period:
        number = max(0, int((at_s - self.begun_s) // self.switch_s))
        return Period(number // 2, number % 2, self.begun_s + number * self.switch_s)

    def has_candidate(self, engine: str, period: Period) -> bool:
        """True where the period is the candidate's half of its pair."""
        coin = hashed(f"{self.candidate}/{self.stage}/{engine}/{period.pair}") < 0.5
        return (period.half == 0) == coin

    def version_for(self, engine: str, at_s: float) -> int:
        if self.is_over or not self.has(engine):
            return self.live
        return self.candidate if self.has_candidate(engine, self.period(at_s)) else self.live


def parse_rollout(data: bytes) -> Rollout:
    values = parse_json(data, "rollout.json of the store")
    schema = values.pop("schema", None)
    if schema != SCHEMA_VERSION:
        raise StoreError(
            f"rollout.json of the store has schema {schema!r} instead of {SCHEMA_VERSION}; promote "
            "a version, or upgrade the engine"
        )
    try:
        values["stages"] = tuple(float(one) for one in values["stages"])
        values["decisions"] = tuple(values.get("decisions") or ())
        read = Rollout(**values)
        is_good = read.switch_s > 0 and 0 <= read.stage < len(read.stages)
        is_good = is_good and all(type(one) is int for one in (read.candidate, read.live))
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"rollout.json of the store is of another form ({error!r}); promote a version"
        ) from error
    if not is_good:
        raise StoreError(
            f"rollout.json of the store has stage {read.stage} of {list(read.stages)}, switch_s "
            f"{read.switch_s}; promote a version"
        )
    return read


def cut_for(share: float, candidate: int, engines: Iterable[str]) -> float:
    """Cut below which the share of the `engines` lies, at least one of them: by chance a hash alone
    may leave a small fleet with none."""
    places = sorted(place_of(engine, candidate) for engine in engines)
    return places[max(1, math.ceil(share * len(places))) - 1] if places else share


def place_of(engine: str, candidate: int) -> float:
    """Place of an engine in [0, 1), another one for each candidate, so that no engine has every
    risk."""
    return hashed(f"{candidate}/{engine}")


def hashed(text: str) -> float:
    digest = hashlib.blake2b(text.encode(), digest_size=6, person=b"rollout").digest()
    return int.from_bytes(digest, "big") / 2**48
