"""Optimizer of a learner whose draft is trained by several processes: the first one has the weights
that are scored and published, and sends the others each batch.

Its interface is `CandidateOptimizer`'s. What the others hold follows from the weights and moments
of the first one alone, so they save nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from draftsmith.distill.config import DistillConfig
from draftsmith.distill.learn.adapters import adapt
from draftsmith.distill.learn.draft_shares import (
    Part,
    Partitioned,
    Replicated,
    Steps,
    new_accelerator,
)
from draftsmith.distill.learn.optimizer import trained
from draftsmith.distill.learn.teachers import Batch, RecordedSource, Share
from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.remote.outline import TargetOutline
from draftsmith.drafters.target.device import device_of
from draftsmith.drafters.target.ranks import LEADER, Channel, in_step
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.top_tokens import TopProbs, top_probs
from draftsmith.train.data.batches import rows_at
from draftsmith.train.objective.teacher import LiveSource, TargetSignals, TargetSource, logits_at
from draftsmith.train.objective.unrolled_loss import StepSums

BLANK = 8  # tokens of a text that trains nothing


class Begin(NamedTuple):
    """Weights set from outside since the last step, and moments after `steps`."""

    number: int  # of the draft
    steps: Steps | None  # None: the moments are as they were


class Step(NamedTuple):
    number: int
    text: TextBatch  # the whole batch, on the host
    weight: float  # of the whole batch
    lr: float
    hidden: int  # width of the states; 0: none
    taps: int  # width of the taps; 0: none
    dtype: torch.dtype  # of both
    top: TopProbs | None  # distributions in place of the states, by `token_index`


class Moments(NamedTuple):
    number: int


class SentSource:
    """States of a share, as the first process sent them."""

    def __init__(self, target: Target, taps: torch.Tensor | None, hidden: torch.Tensor):
        self.target, self.taps, self.hidden = target, taps, hidden

    def read(self, text: TextBatch, taps: tuple[int, ...]) -> TargetSignals:
        return TargetSignals(self.taps, logits_at(self.target, self.hidden))


class SpreadOptimizer:
    """The first process's side; `number` names the draft in what it sends. `part` trains its share
    of each batch."""

    def __init__(
        self, drafter: torch.nn.Module, part: Part, channel: Channel, target: Target, number: int
    ):
        self.drafter, self.part, self.channel = drafter, part, channel
        self.target, self.number = target, number
        self.forget()

    def weights_changed(self) -> None:
        """Notes that the others' weights are behind."""
        self.is_behind = True

    def forget(self) -> None:
        self.fill({})

    def fill(self, moments: Mapping[str, torch.Tensor]) -> None:
        """Sent with the weights before the next step."""
        self.pending: Mapping[str, torch.Tensor] | None = dict(moments)
        self.is_behind = True

    def moments(self) -> dict[str, torch.Tensor]:
        if self.pending is not None:
            return dict(self.pending)
        if not isinstance(self.part, Partitioned):
            return self.part.moments()
        with in_step():
            self.channel.send(Moments(self.number))
            return self.part.moments()

    def step(self, batch: Batch, *, lr: float) -> StepSums | None:
        """As `CandidateOptimizer.step`, on all processes."""
        whole = batch.text.to(torch.device("cpu"))
        order = by_length(whole)
        taps, hidden, top = signals_of(batch.source, whole, self.drafter.taps)
        taps, hidden = (None if one is None else one[order] for one in (taps, hidden))
        some = hidden if taps is None else taps
        call = Step(
            self.number, rows_at(whole, order), batch.weight, lr, width_of(hidden), width_of(taps),
            torch.float32 if some is None else some.dtype, top,
        )  # fmt: skip
        with in_step():
            if self.is_behind:
                self._begin()
            self.channel.send(call)
            for rank in range(1, dist.get_world_size()):
                rows = rows_of(rank, call)
                for states in (hidden, taps):
                    if states is not None:
                        self.channel.give(states[rows], rank)
            rows = rows_of(LEADER, call)
            own = [None if one is None else one[rows] for one in (taps, hidden)]
            share = share_of(call, LEADER, self.target, *own)
            sums = self.part.step(share, lr=lr)
            self.part.copy_to(trained(self.drafter))
        return sums

    def _begin(self) -> None:
        moments = self.pending
        steps = None if moments is None else steps_of(moments)
        self.channel.send(Begin(self.number, steps))
        begin(self.part, self.target, steps, dict(self.drafter.named_parameters()), moments)
        self.is_behind, self.pending = False, None


def begin(
    part: Part,
    target: Target,
    steps: Steps | None,
    weights: Mapping[str, torch.Tensor] | None = None,
    moments: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Sets weights and moments on all processes; the first one gives them."""
    if steps and isinstance(part, Partitioned) and not part.has_moments:
        part.step(blank(part.drafter, target), lr=0.0)
    part.set_weights(weights)
    if steps is not None:
        part.set_moments(steps, moments)


def steps_of(moments: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Steps of those parameters that have made any."""
    return {
        key.removesuffix(":step"): int(value)
        for key, value in moments.items()
        if key.endswith(":step")
    }


def follow_step(part: Part, target: Target, call: Step, channel: Channel, rank: int) -> None:
    """A step of another process than the first."""
    rows, length = len(rows_of(rank, call)), call.text.input_ids.shape[1]
    hidden, taps = (
        channel.take((rows, length, width), call.dtype, LEADER) if width else None
        for width in (call.hidden, call.taps)
    )
    part.step(share_of(call, rank, target, taps, hidden), lr=call.lr)
    part.copy_to(None)


def signals_of(
    source: TargetSource, text: TextBatch, taps: tuple[int, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None, TopProbs | None]:
    """Taps, and either final states or distributions, of a batch on the host."""
    if isinstance(source, RecordedSource):
        return None if source.taps is None else source.taps.cpu(), None, source.top
    assert isinstance(source, LiveSource)
    found = source.reader.states(text.input_ids, text.attention_mask, taps, text.segments)
    return *found, None


def width_of(states: torch.Tensor | None) -> int:
    return 0 if states is None else states.shape[2]


def by_length(text: TextBatch) -> list[int]:
    """Numbers of the rows, the longest first, so that processes have rows of about one length."""
    return text.attention_mask.sum(dim=1).argsort(descending=True, stable=True).tolist()


def rows_of(rank: int, call: Step) -> list[int]:
    """Rows of a process. Where there are too few it has the first one, whose weights count for
    nothing there: all must make the step."""
    return list(range(rank, len(call.text.input_ids), dist.get_world_size())) or [0]


def share_of(
    call: Step,
    rank: int,
    target: Target,
    taps: torch.Tensor | None,
    hidden: torch.Tensor | None,
) -> Share:
    text, device = rows_at(call.text, rows_of(rank, call)), target.device
    if rank >= len(call.text.input_ids):
        text = replace(text, weights=torch.zeros_like(text.weights))
    taps, hidden = (None if one is None else one.to(device) for one in (taps, hidden))
    return Share(text.to(device), source_of(target, taps, hidden, call.top), call.weight)


def source_of(
    target: Target, taps: torch.Tensor | None, hidden: torch.Tensor | None, top: TopProbs | None
) -> TargetSource:
    """Source of a share, of what the first process sent."""
    if hidden is not None:
        return SentSource(target, taps, hidden)
    assert top is not None
    return RecordedSource(target, top, taps)


def blank(drafter: torch.nn.Module, target: Target) -> Share:
    """A share whose gradient is 0."""
    ids = torch.zeros(1, BLANK, dtype=torch.int64, device=target.device)
    text = TextBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        weights=torch.zeros_like(ids).float(),
        token_index=torch.zeros_like(ids),
    )
    hidden = torch.zeros(1, BLANK, target.hidden_size, dtype=target.dtype, device=target.device)
    width = len(drafter.taps) * target.hidden_size
    taps = hidden.new_zeros(1, BLANK, width) if width else None
    if isinstance(target, TargetOutline):
        return Share(text, RecordedSource(target, top_probs(hidden[0], 1), taps), 1.0)
    return Share(text, SentSource(target, taps, hidden), 1.0)


class DraftParts:
    """This process's parts of the drafts that are trained, by number."""

    def __init__(self, config: DistillConfig):
        self.config = config
        self.accelerator = new_accelerator(config.learn, device_of(config.device))
        self.parts: dict[int, Part] = {}

    def lead(
        self, drafter: torch.nn.Module, folder: str, target: Target, channel: Channel, number: int
    ) -> SpreadOptimizer:
        """On the first process. Its part holds `drafter` itself where it is whole."""
        whole = self.config.learn.deepspeed is None
        part = self._part(drafter if whole else self._load(folder, target), target)
        optimizer = SpreadOptimizer(drafter, part, channel, target, number)
        weakref.finalize(optimizer, part.close).atexit = False
        return optimizer

    def open(self, number: int, folder: str, target: Target) -> None:
        """On the others."""
        self.parts[number] = self._part(self._load(folder, target), target)

    def _part(self, drafter: torch.nn.Module, target: Target) -> Part:
        learn = self.config.learn
        kind = Replicated if learn.deepspeed is None else Partitioned
        return kind(drafter, learn, self.accelerator, blank(drafter, target))

    def _load(self, folder: str, target: Target) -> torch.nn.Module:
        drafter = checkpoint.load(folder, target, dtype=torch.float32)
        if self.config.learn.lora is not None:
            adapt(drafter, self.config.learn.lora, seed=self.config.seed)
        return drafter

    def keep(self, alive: Collection[int]) -> None:
        """Drops all others."""
        for number, part in self.parts.items():
            if number not in alive:
                part.close()
        self.parts = {number: part for number, part in self.parts.items() if number in alive}

    def follow(self, call: Begin | Step | Moments, target: Target, channel: Channel) -> None:
        """Makes what the first process makes."""
        part = self.parts[call.number]
        match call:
            case Begin(_, steps):
                begin(part, target, steps)
            case Step():
                follow_step(part, target, call, channel, dist.get_rank())
            case Moments():
                part.moments()
