"""Log line of throughput and acceptance every few seconds, in vLLM's words, "GPU" left out."""

from __future__ import annotations

import logging

from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.stats import StatsReading

log = logging.getLogger(__name__)


def lines(passed: StatsReading, *, running: int, waiting: int, usage: float) -> list[str]:
    """Log lines of the time between two looks; empty for a server that was and is idle."""
    seconds, totals = passed.time_s, passed.totals
    prompt, generated = totals["num_prompt_tokens"], totals["num_generation_tokens"]
    if not (prompt or generated or running or waiting):
        return []
    line = (
        f"Engine 000: Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
        f"Running: {running} reqs, Waiting: {waiting} reqs, KV cache usage: {100 * usage:.1f}%"
    )
    if queried := totals["prefix_cache_queries"]:
        line += f", Prefix cache hit rate: {100 * totals['prefix_cache_hits'] / queried:.1f}%"
    return [line, *_speculation(passed)]


def _speculation(passed: StatsReading) -> list[str]:
    drafts, drafted, accepted = (
        passed.totals[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    if not drafts:
        return []
    # Per round that offered the position: vLLM divides by all rounds, which understates deep
    # positions.
    rates = [
        passed.accepted[position] / offered for position, offered in sorted(passed.offered.items())
    ]
    return [
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, "
        f"Accepted throughput: {accepted / passed.time_s:.2f} tokens/s, Drafted throughput: "
        f"{drafted / passed.time_s:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in rates)}, "
        f"Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"
    ]


class StatsLog:
    def __init__(self, engine: EngineCore):
        self.engine, self._before = engine, StatsReading.of(engine.stats)

    def look(self) -> None:
        """Log the time since the last look."""
        before, self._before = self._before, StatsReading.of(self.engine.stats)
        scheduler = self.engine.scheduler
        for line in lines(
            self._before.since(before),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            usage=scheduler.blocks.usage,
        ):
            log.info(line)
