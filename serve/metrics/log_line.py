"""Log line of throughput and acceptance every few seconds, in vLLM's words, so that tools that
parse vLLM's log parse ours."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from draftsmith.serve.engine.engine import EngineCore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """Counters at a moment."""

    time_s: float
    prompt: int
    generated: int
    drafts: int
    drafted: int
    accepted: int
    offered_at: dict[int, int]
    accepted_at: dict[int, int]
    queried: int
    hit: int

    @classmethod
    def of(cls, engine: EngineCore) -> Snapshot:
        stats = engine.stats
        return cls(
            time.monotonic(),
            stats.num_prompt_tokens,
            stats.num_generation_tokens,
            stats.num_drafts,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            dict(stats.offered),
            dict(stats.accepted),
            stats.prefix_cache_queries,
            stats.prefix_cache_hits,
        )


@dataclass(frozen=True)
class Occupancy:
    running: int
    waiting: int
    kv_usage: float

    @classmethod
    def of(cls, engine: EngineCore) -> Occupancy:
        scheduler = engine.scheduler
        return cls(len(scheduler.running), len(scheduler.waiting), scheduler.blocks.usage)


def lines(before: Snapshot, after: Snapshot, now: Occupancy) -> list[str]:
    """Log lines of the time between; empty for a server that was and is idle."""
    seconds = after.time_s - before.time_s
    prompt, generated = after.prompt - before.prompt, after.generated - before.generated
    if not (prompt or generated or now.running or now.waiting):
        return []
    line = (
        f"Engine 000: Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
        f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, GPU KV cache usage: "
        f"{100 * now.kv_usage:.1f}%"
    )
    if queried := after.queried - before.queried:
        line += f", Prefix cache hit rate: {100 * (after.hit - before.hit) / queried:.1f}%"
    return [line, *_speculation(before, after, seconds)]


def _speculation(before: Snapshot, after: Snapshot, seconds: float) -> list[str]:
    drafts, drafted = after.drafts - before.drafts, after.drafted - before.drafted
    if not drafts:
        return []
    accepted = after.accepted - before.accepted
    # Per round that offered the position: vLLM divides by all rounds, which understates deep
    # positions.
    rates = [
        (after.accepted_at.get(position, 0) - before.accepted_at.get(position, 0)) / offered
        for position in sorted(after.offered_at)
        if (offered := after.offered_at[position] - before.offered_at.get(position, 0))
    ]
    return [
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, Drafted throughput: "
        f"{drafted / seconds:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in rates)}, "
        f"Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"
    ]


class StatsLog:
    def __init__(self, engine: EngineCore):
        self.engine, self._before = engine, Snapshot.of(engine)

    def look(self) -> None:
        """Log the time since the last look."""
        before, self._before = self._before, Snapshot.of(self.engine)
        for line in lines(before, self._before, Occupancy.of(self.engine)):
            log.info(line)
