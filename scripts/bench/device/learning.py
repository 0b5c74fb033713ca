"""Steps of training and of the learner with random weights: tokens a second and peak memory."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch

from draftsmith.distill.config import LearnConfig
from draftsmith.distill.learn.optimizer import CandidateOptimizer, trained
from draftsmith.distill.learn.teachers import Batch
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.batches import pack
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.objective.depth_weights import Exponential
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.objective.unrolled_loss import unrolled_loss
from scripts.bench.device.machine import Machine
from scripts.bench.device.report import Report
from scripts.bench.device.shapes import random_draft, random_target

DEPTHS, DECAY, RATE = 4, 0.8, 1e-5


class Work(NamedTuple):
    rows: int
    length: int
    warm: int  # steps before anything is measured
    steps: int


FULL, TINY = Work(8, 2048, 3, 10), Work(2, 12, 1, 2)


def steps(report: Report, item: str, machine: Machine, size: str) -> None:
    work = FULL if machine.device.type == "cuda" else TINY
    target = random_target(size, machine.device)
    # Float32 weights, computed in bfloat16, as `train` has them.
    drafter = random_draft(target, torch.float32)
    text = batch_of(target, work)
    report.note(item, size=size, training=measure(TrainingStep(drafter, target), text, work))
    report.note(item, learner=measure(LearnerStep(drafter, target), text, work))


def batch_of(target: Target, work: Work) -> TextBatch:
    generator = torch.Generator().manual_seed(0)
    texts = [
        TokenSequence(
            str(row),
            torch.randint(target.vocab_size, (work.length,), generator=generator),
            torch.ones(work.length, dtype=torch.bool),
        )
        for row in range(work.rows)
    ]
    return pack([[text] for text in texts]).to(target.device)


class TrainingStep:
    """Loss, gradient, AdamW."""

    def __init__(self, drafter: torch.nn.Module, target: Target):
        self.drafter, self.source, self.device = drafter, LiveSource(target), target.device
        self.adam = torch.optim.AdamW(trained(drafter).values(), lr=RATE)

    def __call__(self, text: TextBatch) -> None:
        self.adam.zero_grad(set_to_none=True)
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda):
            found = unrolled_loss(
                self.drafter, self.source, text, num_steps=DEPTHS, weighting=Exponential(DECAY)
            )
        (found.total / found.scale).backward()
        self.adam.step()


class LearnerStep:
    """A step of `distill`."""

    def __init__(self, drafter: torch.nn.Module, target: Target):
        self.optimizer, self.source = CandidateOptimizer(drafter, LearnConfig()), LiveSource(target)

    def __call__(self, text: TextBatch) -> None:
        if self.optimizer.step(Batch(text, self.source, 0), lr=RATE) is None:
            raise RuntimeError("a gradient that is not finite")


def measure(step: TrainingStep | LearnerStep, text: TextBatch, work: Work) -> dict[str, Any]:
    device, times_s = text.input_ids.device, []
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    for number in range(work.warm + work.steps):
        begun_s = time.perf_counter()
        step(text)
        if cuda:
            torch.cuda.synchronize(device)
        if number >= work.warm:
            times_s.append(time.perf_counter() - begun_s)
    tokens, seconds = int(text.attention_mask.sum()), statistics.median(times_s)
    return {
        "ms_a_step": 1e3 * seconds,
        "tokens_s": tokens / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else 0,
    }
