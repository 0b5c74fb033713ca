"""Costs of a training run: bytes on disk and in memory, and hours, from one training step that is
really made."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from draftsmith.config import TOP
from draftsmith.drafters.interface import TextBatch, TrainedDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.train.config import UnrollConfig
from draftsmith.train.doctor.memory import num_bytes, parts_of
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.plan.timing import take_turns
from draftsmith.train.trainer import Trainee

TEXT_BYTES = 4 + 1  # a token: its id and its entry of the loss mask, before Parquet packs them
DISTRIBUTION_BYTES = TOP * (4 + 4) + 4  # ids, log-probabilities, the tail
STEP_ROWS, STEP_LENGTH = 4, 256  # of the training step that is timed
TRAINED_BYTES = 16  # of a trained parameter: float32 weight, gradient and two moments
OFFLOADED_TURNS = 2  # of a step that reads the whole target
# A checkpoint of a running training: float32 weights and two moments. The trainer keeps two.
TRAINING_BYTES, CHECKPOINTS = 12, 2


class Cost(NamedTuple):
    """Costs of one candidate. Disk is of the whole run; taps are what storing them would take
    instead of running the target."""

    parameters: int  # trained
    step_s: float  # of `step_tokens` in each process, without the optimizer
    train_tokens_per_s: float
    train_hours: float
    draft_bytes: int
    run_bytes: int  # checkpoints while it trains, and the draft
    taps_bytes: int  # bfloat16; in fp8 half of it
    # of one process's device: weights, gradients and moments; activations on top
    train_memory_bytes: int


class Data(NamedTuple):
    """The text of the run."""

    tokens: int
    bytes: int
    distributions_bytes: int  # where the distributions are stored with it
    generate_hours: float | None  # None where the data is there


def data_of(tokens: int, tokens_per_s: float | None) -> Data:
    return Data(
        tokens=tokens,
        bytes=tokens * TEXT_BYTES,
        distributions_bytes=tokens * DISTRIBUTION_BYTES,
        generate_hours=None if tokens_per_s is None else tokens / tokens_per_s / 3600,
    )


def cost_of(
    target: Target,
    drafter: TrainedDrafter,
    *,
    tokens: int,
    epochs: float,
    shares: int = 1,
    offload: str | None = None,
    processes: int = 1,
) -> Cost:
    """Times a training step of one of `processes`, which needs the draft in float32, and leaves the
    draft as it was but for its gradients."""
    module: Any = drafter
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    step_s = training_step_s(target, module, OFFLOADED_TURNS if offload else None)
    tokens_per_s = processes * step_tokens(target) / step_s
    return Cost(
        parameters=trained,
        step_s=step_s,
        train_tokens_per_s=tokens_per_s,
        train_hours=tokens * epochs / tokens_per_s / 3600,
        draft_bytes=num_bytes(module),
        run_bytes=num_bytes(module) + CHECKPOINTS * TRAINING_BYTES * trained,
        taps_bytes=tokens * len(drafter.taps) * target.hidden_size * torch.bfloat16.itemsize,
        train_memory_bytes=parts_of(target.model).on_device(shares=shares, offload=offload)
        + TRAINED_BYTES * trained,
    )


def step_tokens(target: Target) -> int:
    return STEP_ROWS * min(STEP_LENGTH, target.max_positions)


def training_step_s(target: Target, drafter: torch.nn.Module, turns: int | None = None) -> float:
    """Forward of both and backward of the draft, without the optimizer, whose time does not grow
    with the tokens."""
    trainee = Trainee(drafter, LiveSource(target), UnrollConfig())
    shape = (STEP_ROWS, step_tokens(target) // STEP_ROWS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, shape, generator=generator).to(target.device)
    mask = torch.ones_like(ids)
    text = TextBatch(input_ids=ids, attention_mask=mask, weights=mask.float())
    count = torch.tensor(float(ids.numel()), device=target.device)

    def step() -> None:
        # Timing runs without gradients otherwise.
        with torch.inference_mode(False), torch.enable_grad():
            trainee(text, num_items_in_batch=count)["loss"].backward()

    samples = take_turns({"step": step}, target.device, turns)["step"]
    drafter.zero_grad(set_to_none=True)
    return min(samples)
