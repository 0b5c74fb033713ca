"""Plan of a training whose target is offloaded: memory, and what reading the target costs a step.
Rounds are not planned, as a server holds the whole target."""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftsmith.drafters.target.target import Target
from draftsmith.train.doctor.memory import OFFLOADED, parts_of
from draftsmith.train.plan.candidates import Planned
from draftsmith.train.plan.costs import OFFLOADED_TURNS, step_tokens
from draftsmith.train.plan.text import aligned, gib
from draftsmith.train.plan.timing import take_turns

HEAD = ("draft", "taps", "trained", "step s", "train h", "memory", "run on disk", "taps on disk")


class Offloaded(NamedTuple):
    device_bytes: int  # of the target: all beside its layers, and the largest as it is read
    layers_bytes: int  # in the host's memory or in the files
    read_s: float  # of a pass over one token, which is nearly all reading
    step_tokens: int


def time_reading(target: Target, offload: str) -> Offloaded:
    parts = parts_of(target.model)
    ids = torch.full((1, 1), 7, device=target.device)
    samples = take_turns(
        {"read": lambda: target.states(ids, torch.ones_like(ids), ())},
        target.device,
        OFFLOADED_TURNS,
    )
    return Offloaded(
        device_bytes=parts.on_device(offload=offload),
        layers_bytes=sum(parts.layers),
        read_s=min(samples["read"]),
        step_tokens=step_tokens(target),
    )


def offloaded_table(planned: list[Planned], found: Offloaded, offload: str, streams: int) -> str:
    """Drafts with the cheapest training first, and how the figures are to be read."""
    ordered = sorted(planned, key=lambda one: one.cost.train_hours)
    rows = aligned([HEAD, *(row_of(one) for one in ordered)])
    share = min(1.0, found.read_s / min(one.cost.step_s for one in planned))
    notes = (
        f"the target takes {gib(found.device_bytes)} of the device and {gib(found.layers_bytes)} "
        f"{OFFLOADED[offload]}; memory is of the device, activations on top",
        f"step s is of a step of {found.step_tokens:,} tokens, of which reading the target takes "
        f"{found.read_s:.3g} s (up to {share:.0%}), as it does in a step of more tokens: train "
        "with --packing and a large batch_size, or read it once with generate --keep-answers "
        "--store-taps",
        "rounds are not timed: serve holds the whole target, "
        f"{gib(max(one.serve_memory_bytes for one in planned))} with keys and values of "
        f"{streams} streams at most; plan without --target-offload where it fits",
    )
    return "\n\n".join((rows, *notes))


def row_of(planned: Planned) -> tuple[str, ...]:
    cost = planned.cost
    return (
        planned.candidate.name,
        ",".join(map(str, planned.taps)) or "-",
        f"{cost.parameters / 1e6:.1f} M",
        f"{cost.step_s:.3g}",
        f"{cost.train_hours:.2f}",
        gib(cost.train_memory_bytes),
        gib(cost.run_bytes),
        gib(cost.taps_bytes),
    )
