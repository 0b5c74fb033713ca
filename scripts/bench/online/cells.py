"""Experiments of scripts/bench_online: a cell is one of them with one seed, kept as one JSON file.
Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from scripts.bench.online.streams import Stream, blocks, gradual, turns

LEARNED, NO_REPLAY, PERIODIC = "learning", "no-replay", "periodic"
HALF = "half-batch"  # 4 texts a step
HELD_OUT = "held-out"  # evidence from held-out requests alone
WARM, COLD = "warm", "cold"
# the warm draft was trained on answers to the first
FIRST, SECOND, THIRD = "code", "prose", "headers"
REQUESTS = 2000  # after a shift, as in the goals; other sizes are shares of it


@dataclass(frozen=True)
class Cell:
    part: str
    name: str
    seed: int
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"seed-{self.seed}/{self.part}/{self.name}"

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Curve:
    """A stream of requests and the draft that serves it."""

    stream: Callable[[int], Stream]  # of the requests after a shift
    learner: str = LEARNED
    start: str = WARM
    is_compared: bool = False  # at its end, with a draft distilled offline from the same texts
    is_paired: bool = False  # with the static draft on the same texts
    ends_at_warm: bool = False  # as soon as it drafts as the warm draft does


def part_of(requests: int, share: float) -> int:
    return max(8, round(requests * share))


def there_and_back(requests: int) -> Stream:
    return blocks(
        (FIRST, part_of(requests, 0.1)), (SECOND, requests), (FIRST, part_of(requests, 0.1))
    )


def there(second: str, before: float, after: float) -> Callable[[int], Stream]:
    return lambda requests: blocks(
        (FIRST, part_of(requests, before)), (second, part_of(requests, after))
    )


def gradually(requests: int) -> Stream:
    return gradual(FIRST, SECOND, part_of(requests, 0.3))


def to_and_fro(requests: int) -> Stream:
    return turns((FIRST, SECOND), part_of(requests, 0.025), 6)


def again(requests: int) -> Stream:
    return turns((FIRST, SECOND, THIRD), part_of(requests, 0.05), 2)


CURVES: dict[str, Curve] = {
    "sudden": Curve(there_and_back, is_compared=True),
    "sudden-half-batch": Curve(there_and_back, HALF, is_compared=True),
    "sudden-periodic": Curve(there(SECOND, 0.05, 0.3), PERIODIC),
    "sudden-headers": Curve(there(THIRD, 0.05, 0.3)),
    "no-replay": Curve(there_and_back, NO_REPLAY),
    "gradual": Curve(gradually, is_paired=True),
    "oscillating": Curve(to_and_fro, is_paired=True),
    "recurring": Curve(again, is_paired=True),
    "gradual-held-out": Curve(gradually, HELD_OUT, is_paired=True),
    "oscillating-held-out": Curve(to_and_fro, HELD_OUT, is_paired=True),
    "recurring-held-out": Curve(again, HELD_OUT, is_paired=True),
    "recurring-periodic": Curve(again, PERIODIC),
    "cold": Curve(
        lambda requests: blocks((FIRST, part_of(requests, 0.5))), start=COLD, ends_at_warm=True
    ),
}
VARIED = ("sudden", "gradual", "oscillating", "recurring")


@dataclass(frozen=True)
class Point:
    """Options of the learner that change what learning costs."""

    steps: int = 8  # optimizer steps per update
    fresh: int = 8  # texts per update
    batch: int = 8  # texts per step
    depths: int = 3  # drafted positions unrolled
    rate: float = 1.0  # of the setting's learning rate
    teacher: str = "live"
    dtype: str = "auto"  # of the arithmetic


@dataclass(frozen=True)
class Pipeline:
    """A recipe whose stage `learn` is measured beside the points."""

    recipe: str  # its name in recipes/pipelines
    is_at_our_rate: bool = False  # the setting's learning rate and warm-up in place of its own


# From the dearest to the cheapest; the first is what the others are compared with.
POINTS: dict[str, Point] = {
    "8-per-8": Point(),
    "recorded": Point(teacher="recorded"),
    "float32": Point(dtype="float32"),
    "one-depth": Point(depths=1),
    "half-batch": Point(batch=4),
    "quarter-batch": Point(batch=2),
    "4-per-8": Point(steps=4),
    "8-per-16": Point(fresh=16),
    "2-per-8": Point(steps=2),
    "2-per-8-fast": Point(steps=2, rate=2.0),
    "8-per-32": Point(fresh=32),
    "1-per-8": Point(steps=1),
}


@dataclass(frozen=True)
class Variant:
    """Options of the learner beside those that it is measured with."""

    optimizer: str = "adamw"
    rate: float = 1.0  # of the setting's learning rate


FAST, MUON = "twice-the-rate", "muon"
# On the same texts, beside a draft that is distilled offline from them; only when asked for.
VARIANTS: dict[str, Variant] = {
    "as-it-is": Variant(),
    FAST: Variant(rate=2.0),
    MUON: Variant("muon", rate=2.0),
}
OFFLINE = "offline"
# Streams with those learners and a gate; only when asked for by name.
CURVES |= {
    f"{name}-{learner}": replace(CURVES[name], learner=learner)
    for name in VARIED
    for learner in (FAST, MUON)
}
# Recipes of pipelines at the same stream, with their own options of learning; without their drafts
# by topic.
PIPELINES: dict[str, Pipeline] = {
    "osd": Pipeline("osd"),
    "osd-our-rate": Pipeline("osd", is_at_our_rate=True),
}
# Without learning; what they keep does not depend on when a request comes, but for suffix, which
# remembers.
BASELINES = ("static", "ngram", "suffix")
SYSTEM, CAPTURE, GATE, OBJECTIVES = "system", "capture", "gate", "objectives"
COST, BOUNDS, CHANGES = "cost", "bounds", "changes"  # only when asked for
ALIKE, FALLING = "alike-replay", "falling-rate"
CHANGE_CELLS = (ALIKE, FALLING)
# Kinds that come back, each visit's share of the requests; only when asked for.
RETURNS, RETURNING, REHEARSED = "returns", "returning", "returning-rehearsed"
VISITS = ((FIRST, 0.1), (SECOND, 5 / 12), (FIRST, 0.2), (SECOND, 0.2))
RETURN_LEARNERS = {f"{RETURNING}-{learner}": learner for learner in (FAST, MUON)}
RETURN_CELLS = (RETURNING, REHEARSED)
VARIANTS_PART = "variants"
BOUNDED = ("gradual", "oscillating", "recurring")
BOUND_CELLS = tuple(f"{name}-{BOUNDS}" for name in BOUNDED)
# Drafts of classes, on the three domains at once; only when asked for. `BOUND` is offline.
POOLS = "pools"
BOUND, STATIC, SINGLE, TAGGED, CLUSTERED = (
    "pools-bound", "pools-static", "pools-single", "pools-tagged", "pools-clustered"
)  # fmt: skip
POOL_CELLS = (BOUND, STATIC, SINGLE, TAGGED, CLUSTERED)
# In the order of their worth, should an hour end too soon.
PARTS = ("baselines", "curves", GATE, SYSTEM, OBJECTIVES, CAPTURE)
LATE = ("no-replay", *(name for name, one in CURVES.items() if one.learner in (HALF, HELD_OUT)))
# what can be asked for alone
NAMES = (
    *PARTS, COST, POOLS, BOUNDS, CHANGES, RETURNS,
    *CURVES, *POINTS, *PIPELINES, *POOL_CELLS, *BOUND_CELLS, *CHANGE_CELLS,
    *RETURN_CELLS, *RETURN_LEARNERS, VARIANTS_PART, *VARIANTS, OFFLINE,
)  # fmt: skip


def plan(*, seeds: int, requests: int, only: Sequence[str] = PARTS) -> Iterator[Cell]:
    """Seed by seed, so that an interrupted run has measured everything at least once."""
    every = [
        cell
        for seed in range(seeds)
        for part in (*PARTS, COST, POOLS, BOUNDS, CHANGES, RETURNS, VARIANTS_PART)
        for cell in cells_of(part, seed, requests)
    ]
    chosen = [
        cell
        for cell in every
        if cell.name in only or (cell.part in only and not is_variant_of(cell))
    ]
    yield from (cell for cell in chosen if cell.name not in LATE)
    yield from (cell for cell in chosen if cell.name in LATE)


def is_variant_of(cell: Cell) -> bool:
    """True for streams of other cells with a learner of `VARIANTS`."""
    return cell.name in RETURN_LEARNERS or (
        cell.part == "curves" and CURVES[cell.name].learner in VARIANTS
    )


def cells_of(part: str, seed: int, requests: int) -> Iterator[Cell]:
    if part == "baselines":
        yield Cell(part, "baselines", seed, {"requests": part_of(requests, 0.05)})
    elif part == "curves":
        yield from (Cell(part, name, seed, {"requests": requests}) for name in CURVES)
    elif part == COST:
        yield from (
            Cell(part, name, seed, {"requests": part_of(requests, 0.35)})
            for name in (*POINTS, *PIPELINES)
        )
    elif part == POOLS:
        for name in POOL_CELLS:
            share = 0.05 if name == BOUND else 0.5
            yield Cell(part, name, seed, {"requests": part_of(requests, share)})
    elif part == BOUNDS:
        yield from (Cell(part, name, seed, {"requests": requests}) for name in BOUND_CELLS)
    elif part == CHANGES:
        yield Cell(part, ALIKE, seed, {"requests": requests})
        yield Cell(part, FALLING, seed, {"requests": part_of(requests, 0.25)})
    elif part == RETURNS:
        names = (*RETURN_CELLS, *RETURN_LEARNERS)
        yield from (Cell(part, name, seed, {"requests": requests}) for name in names)
    elif part == VARIANTS_PART:
        for name in (OFFLINE, *VARIANTS):
            yield Cell(part, name, seed, {"requests": part_of(requests, 0.75)})
    elif part == GATE:
        yield Cell(part, GATE, seed, {"requests": part_of(requests, 0.1)})
    elif part == OBJECTIVES:
        yield Cell(part, OBJECTIVES, seed, {"requests": part_of(requests, 0.1)})
    elif part == SYSTEM:
        yield Cell(part, SYSTEM, seed, {"requests": part_of(requests, 0.15)})
    elif seed == 0:
        yield Cell(part, CAPTURE, seed, {"turns": 8})
