"""Steps of training and of the learner with random weights: tokens a second and peak memory, EAGLE-3
with and without flex attention, DFlash, and two processes where there are two devices."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from draftsmith.distill.config import LearnConfig
from draftsmith.distill.learn.optimizer import CandidateOptimizer, trained
from draftsmith.distill.learn.teachers import Batch
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.unrolled import unroll
from draftsmith.files import write_json
from draftsmith.train.data.batches import pack
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.objective.depth_weights import Exponential
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.objective.unrolled_loss import unrolled_loss
from scripts.bench.device.shapes import device_of, random_draft, random_target, stage_parser

DEPTHS, DECAY, RATE = 4, 0.8, 1e-5


class Work(NamedTuple):
    rows: int
    length: int
    warm: int  # steps before anything is measured
    steps: int


FULL, TINY = Work(8, 2048, 3, 10), Work(2, 12, 1, 2)


def main(arguments: list[str] | None = None) -> int:
    parser = stage_parser("training", __doc__)
    parser.add_argument("--processes", type=int, default=None, help="of a step of training")
    options = parser.parse_args(arguments)
    rank, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo" if options.dry_run else "nccl")
    device = device_of(options, rank)
    work = TINY if options.dry_run else FULL
    target = random_target(options.size, device)
    # Float32 weights, computed in bfloat16, as `train` has them.
    drafter = random_draft(target, torch.float32)
    report: dict[str, Any] = {"schema": 1, "size": options.size, "processes": world}
    report["training"] = measure(TrainingStep(drafter, target), batch_of(target, work), work)
    if world == 1:
        write_json(options.out, report)
        with without_flex():
            step = TrainingStep(drafter, target)
            report["training_without_flex"] = measure(step, batch_of(target, work), work)
        write_json(options.out, report)
        blocks = TrainingStep(random_draft(target, torch.float32, "dflash"), target)
        work_of_blocks = work._replace(rows=2)  # a block has several slots at every column
        report["dflash"] = measure(blocks, batch_of(target, work_of_blocks), work_of_blocks)
        del step, blocks
        write_json(options.out, report)
        report["learner"] = measure(LearnerStep(drafter, target), batch_of(target, work), work)
        write_json(options.out, report)
        processes = options.processes
        if processes is None:
            processes = 2 if options.dry_run else min(2, torch.cuda.device_count())
        if processes > 1:
            report["two_processes"] = launched(options.out, sys.argv[1:], processes)
    if rank == 0:
        write_json(options.out, report)
        print(report)
    if world > 1:
        dist.destroy_process_group()
    return 0


@contextmanager
def without_flex() -> Iterator[None]:
    """The unroll's attention as it is where torch has no `flex_attention`."""
    can_flex = unroll.can_flex
    unroll.can_flex = lambda query, value: False
    try:
        yield
    finally:
        unroll.can_flex = can_flex


def launched(out: str, arguments: list[str], processes: int) -> dict[str, Any]:
    """The figures of training by so many processes, or why there are none."""
    beside = Path(out).with_name("training-together.json")
    arguments = [*arguments, "--out", str(beside)]  # the last one counts
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc_per_node={processes}", "-m", "scripts.bench.device.training"]  # fmt: skip
    status = subprocess.run([*command, *arguments]).returncode
    if status:
        return {"failed": f"ended with status {status}"}
    return dict(json.loads(beside.read_text(encoding="utf-8"))["training"])


def batch_of(target: Target, work: Work) -> TextBatch:
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
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
    """Loss, gradient, its mean over the processes, AdamW."""

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
        if dist.is_initialized():
            for parameter in trained(self.drafter).values():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
        self.adam.step()


class LearnerStep:
    """A step of `distill`."""

    def __init__(self, drafter: torch.nn.Module, target: Target):
        self.optimizer, self.source = CandidateOptimizer(drafter, LearnConfig()), LiveSource(target)

    def __call__(self, text: TextBatch) -> None:
        if self.optimizer.step(Batch(text, self.source, 0), lr=RATE) is None:
            raise RuntimeError("a gradient that is not finite")


def measure(step: TrainingStep | LearnerStep, text: TextBatch, work: Work) -> dict[str, float]:
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
    tokens = int(text.attention_mask.sum())
    seconds = statistics.median(times_s)
    return {
        "ms_a_step": 1e3 * seconds,
        "tokens_a_step": tokens,
        "tokens_s_a_process": tokens / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else 0,
    }


if __name__ == "__main__":
    sys.exit(main())
