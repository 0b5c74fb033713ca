"""Figures of scripts/bench_online from the answers of its cells, each a dictionary as of
`online_world.Answer`. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Answer = dict[str, Any]
Answers = Sequence[Answer]
WINDOW = 50  # requests that a moving figure is of
RECOVERED = 0.9
FINAL = 200  # requests that give the end of a curve


def pooled_alpha(answers: Answers) -> float:
    return sum(one["accepted"] for one in answers) / max(1, sum(one["tried"] for one in answers))


def pooled_tau(answers: Answers) -> float:
    """Committed tokens a target pass; the passes that read prompts commit one and are left out with
    it."""
    return sum(one["tokens"] - 1 for one in answers) / max(
        1, sum(one["passes"] - 1 for one in answers)
    )


def seconds(answers: Answers) -> float:
    """Seconds of CPU time, serving and learning, between the first and the last answer."""
    first, last = answers[0], answers[-1]
    return last["serve_s"] + last["learn_s"] - first["serve_s"] - first["learn_s"]


def moving(
    answers: Answers, figure: Callable[[Answers], float], window: int = WINDOW
) -> list[float]:
    """Entry n is of the `window` answers that end with number n; earlier ones are nan."""
    return [
        figure(answers[end - window + 1 : end + 1]) if end + 1 >= window else math.nan
        for end in range(len(answers))
    ]


def segments(answers: Answers) -> list[Answers]:
    """Runs of one domain, in the order of the requests."""
    found: list[list[Answer]] = []
    for one in sorted(answers, key=lambda one: one["number"]):
        if not found or found[-1][-1]["domain"] != one["domain"]:
            found.append([])
        found[-1].append(one)
    return list(found)


def recovered_after(
    answers: Answers, goal: float, figure: Callable[[Answers], float] = pooled_alpha
) -> int | None:
    """Requests until the moving figure first reaches `goal`; None where it never does."""
    values = moving(answers, figure, min(WINDOW, max(1, len(answers) // 4)))
    return next((index + 1 for index, value in enumerate(values) if value >= goal), None)


def final_alpha(answers: Answers) -> float:
    return pooled_alpha(answers[-min(FINAL, max(1, len(answers) // 3)) :])
