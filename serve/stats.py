"""The engine's counters: plain numbers, written by its thread, read by the metrics endpoint at any
time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from draftsmith.kernels.acceptance import AcceptanceCounts

# counted apart, with all that draft now; a server that learns for months sees thousands
MAX_VERSIONS = 16
MAX_PAUSES = 256  # of swaps, kept for the percentile
TEXT = "text"  # the version of what text drafted in place of a trained draft
PHASES = ("draft", "verify", "sample", "host")
# Totals that a reading has.
READ = (
    "num_prompt_tokens", "num_generation_tokens", "num_drafts", "num_draft_tokens",
    "num_accepted_tokens", "prefix_cache_queries", "prefix_cache_hits",
)  # fmt: skip


@dataclass(slots=True)
class Phase:
    """A `with` block of which the engine enters several a round, whose own time counts. One is
    entered again and again, but not within itself."""

    time_s: dict[str, float]
    name: str
    begun_s: float = field(default=0.0, compare=False)

    def __enter__(self) -> None:
        self.begun_s = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.time_s[self.name] += perf_counter() - self.begun_s


@dataclass
class EngineStats:
    # of rounds that offered at least one token
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    num_rounds: int = 0  # engine rounds, whatever their batch
    # engine rounds that decided, by the deepest draft planned
    rounds_by_k: Counter[int] = field(default_factory=Counter)
    num_drafts: int = 0  # rounds of a request that offered tokens
    num_draft_tokens: int = 0  # of a tree its depth: what a round could have kept
    num_tree_nodes: int = 0  # of trees put before the target
    num_accepted_tokens: int = 0  # kept and still there after stop and EOS trimming
    # by position, whether or not it was reached
    offered: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)  # by position, after trimming
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    # Of sampled requests with a seed of their own, which are neither learned from nor measured.
    num_seeded_requests: int = 0
    num_seeded_tokens: int = 0  # generated
    prefix_cache_queries: int = 0  # tokens of requests when they are admitted
    prefix_cache_hits: int = 0  # of these, tokens found in cached blocks
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    # rounds that fell back to k = 0, by cause
    fallbacks: Counter[str] = field(default_factory=Counter)
    num_swaps: int = 0
    swap_pauses_s: list[float] = field(default_factory=list)  # of the latest swaps, oldest first
    longest_swap_pause_s: float = 0.0  # of all swaps
    num_swaps_refused: int = 0
    draft_version: str = ""
    # `acceptance` of the latest versions, oldest first, and of `TEXT`.
    by_version: dict[str, AcceptanceCounts] = field(default_factory=dict)
    # `acceptance` by the context of the round, as `kernels/acceptance.py` numbers it
    by_context: dict[int, AcceptanceCounts] = field(default_factory=dict)
    time_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def seeded_share(self) -> float | None:
        """Share of the generated tokens that seeded requests have; None before any."""
        return (
            self.num_seeded_tokens / self.num_generation_tokens
            if self.num_generation_tokens
            else None
        )

    def __post_init__(self) -> None:
        # Each adds the time of what is inside to `time_s`.
        self.phases = {name: Phase(self.time_s, name) for name in PHASES}

    def count_round(
        self,
        offered: int,
        accepted: int,
        committed: int,
        *,
        version: str | None,
        bucket: int = 0,
        times: int = 1,
    ) -> None:
        """Count requests' shares of a round, `times` alike, that offered at least one drafted
        token; `version` is that of the draft, None where text drafted in its place; `bucket` is of
        the tokens before the round."""
        kept = min(accepted, committed)
        self.num_drafts += times
        self.num_draft_tokens += times * offered
        self.num_accepted_tokens += times * kept
        for position in range(offered):
            self.offered[position] += times
        for position in range(kept):
            self.accepted[position] += times
        by_version = self._of_version(TEXT if version is None else version)
        for counts in (self.acceptance, by_version, self._of_context(bucket)):
            counts.add([offered], [accepted], [committed], times)

    def count_swap(self, version: str, pause_s: float) -> None:
        self.draft_version = version
        self.num_swaps += 1
        # Replaced, not changed: a scrape may be walking through it.
        self.swap_pauses_s = [*self.swap_pauses_s, pause_s][-MAX_PAUSES:]
        self.longest_swap_pause_s = max(self.longest_swap_pause_s, pause_s)

    def _of_version(self, version: str) -> AcceptanceCounts:
        if version not in self.by_version:
            # One that still drafts must not begin at 0 again.
            idle = [name for name in self.by_version if name not in (TEXT, self.draft_version)]
            gone = idle[: max(0, len(self.by_version) + 1 - MAX_VERSIONS)]
            kept = {name: counts for name, counts in self.by_version.items() if name not in gone}
            # Replaced, not changed: a scrape may be walking through it.
            self.by_version = {**kept, version: AcceptanceCounts()}
        return self.by_version[version]

    def _of_context(self, bucket: int) -> AcceptanceCounts:
        if bucket not in self.by_context:
            # Replaced, not changed, and in order of length.
            found = {**self.by_context, bucket: AcceptanceCounts()}
            self.by_context = dict(sorted(found.items()))
        return self.by_context[bucket]


class StatsReading(NamedTuple):
    """Counters at a moment, copied, as the engine goes on counting; or those of a time between."""

    time_s: float
    totals: Counter[str]  # by name
    offered: Counter[int]
    accepted: Counter[int]
    acceptance: AcceptanceCounts

    @classmethod
    def of(cls, stats: EngineStats) -> StatsReading:
        totals = Counter({name: getattr(stats, name) for name in READ})
        positions = stats.offered.copy(), stats.accepted.copy()
        return cls(perf_counter(), totals, *positions, stats.acceptance.copy())

    def since(self, before: StatsReading) -> StatsReading:
        return StatsReading(
            self.time_s - before.time_s,
            self.totals - before.totals,
            self.offered - before.offered,
            self.accepted - before.accepted,
            self.acceptance.since(before.acceptance),
        )
