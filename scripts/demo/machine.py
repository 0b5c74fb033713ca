"""Pace of this machine, and the sizes of the quickstart's stages by it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.drafters.target.load import load_model

# Passes a second over one token of the shipped target on two quiet cores, and what a stage does
# there in a second.
PASSES = 220.0
ANSWERS, REQUESTS = 16.0, 2.6
MEASURED_S = 1.5
# A slower machine does less in the same time, down to this share; a faster one ends earlier.
LEAST_PACE = 0.3


@dataclass(frozen=True)
class Sizes:
    """Amounts of the stages, and the seconds that each unit of it takes."""

    answers: int
    requests: int
    train_minutes: float  # of the two drafts at once
    second_an_answer: float
    second_a_request: float


def sizes_of(pace: float) -> Sizes:
    """Sizes at which the stages take as long on a machine of `pace` as on one of 1."""
    share = min(1.0, max(LEAST_PACE, pace))
    return Sizes(
        answers=round(600 * share),
        requests=round(260 * share),
        train_minutes=1.3,
        second_an_answer=1 / (ANSWERS * pace),
        second_a_request=1 / (REQUESTS * pace),
    )


@torch.inference_mode()
def measure_pace(target: Path) -> float:
    """Passes a second over one token, as a share of `PASSES`."""
    model = load_model(target, trust_remote_code=False, dtype=torch.float32)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(10):
        model(input_ids=ids, use_cache=False)
    passes, begun_s = 0, time.perf_counter()
    while time.perf_counter() - begun_s < MEASURED_S:
        model(input_ids=ids, use_cache=False)
        passes += 1
    return passes / (time.perf_counter() - begun_s) / PASSES
