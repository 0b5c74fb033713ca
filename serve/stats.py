"""What the engine counts: plain numbers, written by its thread, read by the metrics endpoint at any time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from draftsmith.kernels.acceptance import AcceptanceCounts

PHASES = ("draft", "verify", "sample", "host")


@dataclass
class EngineStats:
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)  # of rounds that offered at least one token
    num_rounds: int = 0  # engine rounds, whatever their batch
    num_drafts: int = 0  # rounds of a request that offered tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # kept and still there after stop and EOS trimming
    offered: Counter[int] = field(default_factory=Counter)  # by position, whether or not it was reached
    accepted: Counter[int] = field(default_factory=Counter)  # by position, after trimming
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    fallbacks: Counter[str] = field(default_factory=Counter)  # rounds that fell back to k = 0, by cause
    num_swaps: int = 0
    swap_pauses_s: list[float] = field(default_factory=list)  # one a swap, oldest first
    num_swaps_refused: int = 0
    draft_version: str = ""
    time_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun_s = perf_counter()
        try:
            yield
        finally:
            self.time_s[name] += perf_counter() - begun_s

    def count_round(self, offered: int, accepted: int, committed: int) -> None:
        """One request's share of a round that put `offered` >= 1 draft tokens before the target."""
        kept = min(accepted, committed)
        self.num_drafts += 1
        self.num_draft_tokens += offered
        self.num_accepted_tokens += kept
        for position in range(offered):
            self.offered[position] += 1
        for position in range(kept):
            self.accepted[position] += 1
        self.acceptance.add([offered], [accepted], [committed])
