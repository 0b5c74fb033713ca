"""Goodput: answers that keep every latency asked for, as `vllm bench serve --goodput` counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftsmith.errors import UserError
from draftsmith.serve.bench.client import Answer

LATENCIES: dict[str, Callable[[Answer], float]] = {
    "ttft": lambda answer: answer.ttft_s,
    "tpot": lambda answer: answer.tpot_s or 0.0,
    "e2el": lambda answer: answer.e2el_s,
}
Goal = dict[str, float]  # milliseconds by latency


def goal_of(words: Sequence[str]) -> Goal:
    """["ttft:200", "tpot:50"] -> {"ttft": 200.0, "tpot": 50.0}."""
    goal = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            goal[name] = float(limit)
        except ValueError:
            goal[name] = 0.0
        if name not in LATENCIES or goal[name] <= 0:
            raise UserError(f"goodput {word!r} is no limit; give {', '.join(LATENCIES)} with milliseconds, for example ttft:200")
    return goal


def keeps(answer: Answer, goal: Goal) -> bool:
    return all(1e3 * LATENCIES[name](answer) <= limit for name, limit in goal.items())
