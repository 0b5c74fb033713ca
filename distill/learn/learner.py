"""Training on served text: the trainer's objective, at the positions that verification visited.

Fresh texts are mixed with the latest ones before them and with a reservoir of all. Training on a
few texts again and again teaches less than the same steps spread over many, and the mixture
protects what the draft has learned.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from draftsmith.distill.buffer.traffic import ServedText, branched, newest_within, text_row, without
from draftsmith.distill.config import LearnConfig
from draftsmith.distill.config_checks import check_learn
from draftsmith.distill.learn.teachers import (
    DraftedSpan,
    LearningBatch,
    LearningRow,
    check_positions,
    teacher_of,
)
from draftsmith.distill.learn.text_states import TextStates, states_of
from draftsmith.drafters.target.device import fast_at_bf16
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.dispatch import autocast, reads_freely
from draftsmith.kernels.divergence.kind import kind_of
from draftsmith.train.objective.unrolled_loss import StepSums, UnrolledLoss, unrolled_loss
from draftsmith.train.optim import MUON_MOMENT, muon_with_adamw, part_of

# So many steps in a row without a finite gradient mean that the candidate is lost.
MAX_BROKEN_STEPS = 3
LATEST = 128  # texts
MOST_BRANCHES = 16  # rejected continuations of a step
# Saved among the optimizer's moments.
AVERAGE = "average"
Rest = Callable[[float], None]  # called with the seconds of a piece of work


def no_rest(worked_s: float) -> None:
    """No rest, for a learner on a device of its own."""


@dataclass(frozen=True)
class UpdateReport:
    broken: int  # steps skipped because their gradient was not finite
    # token mean of the divergence over the depths, before the last step; None without one
    loss: float | None
    alpha: list[float]  # of each depth, on the same batch
    tokens: int  # trained positions in the update
    masked: int  # positions that were not, without a recorded distribution


@dataclass
class Reservoir:
    """Uniform sample of all texts ever seen, in bounded memory (Vitter's algorithm R), and the
    latest ones; without distributions that training does not read. `tap_bytes` bounds the hidden
    states of the sample, and those of the latest ones."""

    capacity: int
    keeps_p: bool = False
    tap_bytes: float = math.inf
    texts: list[ServedText] = field(default_factory=list)
    latest: list[ServedText] = field(default_factory=list)
    seen: int = 0

    def arrived(self, fresh: Sequence[ServedText]) -> None:
        latest = [*self.latest, *map(self.slim, fresh)][-LATEST:]
        self.latest = newest_within(latest, self.tap_bytes)

    def slim(self, text: ServedText) -> ServedText:
        return text.slim(keeps_p=self.keeps_p)

    def sample(self, count: int, rng: random.Random) -> list[ServedText]:
        """Half of the latest texts, half of all; fewer where there are not so many."""
        of_all = min(count // 2, len(self.texts))
        of_latest = min(count - count // 2, len(self.latest))
        return rng.sample(self.texts, of_all) + rng.sample(self.latest, of_latest)

    def forget(self, answers: frozenset[str]) -> None:
        self.texts, self.latest = without(self.texts, answers), without(self.latest, answers)

    def add(self, text: ServedText, rng: random.Random) -> None:
        self.seen += 1
        held = sum(one.tap_bytes for one in self.texts)
        if len(self.texts) < self.capacity and held + text.tap_bytes <= self.tap_bytes:
            self.texts.append(self.slim(text))
        elif (place := rng.randrange(self.seen)) < len(self.texts):
            self.texts[place] = self.slim(text)
            while sum(one.tap_bytes for one in self.texts) > self.tap_bytes:
                del self.texts[rng.randrange(len(self.texts))]


class Learner:
    """Owner of the candidate's optimizer and of the reservoir. Randomness depends on `seed` and the
    number of the update alone. `states` of the target may be shared with others."""

    def __init__(
        self,
        drafter: torch.nn.Module,
        target: Target,
        config: LearnConfig,
        *,
        seed: int,
        states: TextStates | None = None,
    ):
        check_learn(config)
        self.drafter, self.target, self.config, self.seed = drafter, target, config, seed
        check_positions(config, drafter)
        known = states_of(target, config) if states is None else states
        self.teacher = teacher_of(config, target, drafter.taps, known)
        self.reservoir = Reservoir(config.reservoir, self.teacher.keeps_p, taps_share(config))
        self.parameters = trained(drafter)
        self.optimizer = CandidateOptimizer(drafter, config)
        self.updates = 0
        self.at_step = 0  # of the update that is being made, from 1
        self._begin()

    def _begin(self) -> None:
        """Begins at the draft's weights, which are the live version's."""
        self.steps = 0
        self.average: dict[str, torch.Tensor] = {}

    def _copies(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def restart(self, live: Mapping[str, torch.Tensor]) -> None:
        """Returns to the live version's weights, with a fresh optimizer."""
        self.drafter.load_state_dict(live)
        self.optimizer.forget()
        self._begin()

    def moments(self) -> dict[str, torch.Tensor]:
        """Optimizer state and the mean of the weights, as "<parameter>:<moment>"."""
        return self.optimizer.moments() | {
            f"{name}:{AVERAGE}": value for name, value in self.average.items()
        }

    def fill(
        self, steps: int, weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]
    ) -> None:
        """Loads a saved state to go on from."""
        self.steps = steps
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
        averages = {name: moments.get(f"{name}:{AVERAGE}") for name in self.parameters}
        self.average = {
            name: value.to(self.parameters[name].device)
            for name, value in averages.items()
            if value is not None
        }
        self.optimizer.fill(
            {key: value for key, value in moments.items() if not key.endswith(f":{AVERAGE}")}
        )

    def update(self, fresh: Sequence[ServedText], rest: Rest = no_rest) -> UpdateReport:
        """Takes a bounded number of steps, however much came in. Every fresh text is then among the
        latest ones and may enter the reservoir. `rest` gets the seconds of each step."""
        rng = random.Random(f"{self.seed} {self.updates}")
        queue = list(fresh)
        rng.shuffle(queue)
        broken = in_a_row = tokens = masked = 0
        loss: float | None = None
        alpha: list[float] = []
        for step in range(self.config.steps):
            begun_s, self.at_step = time.perf_counter(), step + 1
            batch = self.teacher.batch(self._rows(self._texts(queue, step, rng), rng))
            masked += batch.masked
            if batch.tokens == 0:
                continue
            sums = self._step(batch)
            if sums is not None:
                loss, alpha = summary(sums)
                in_a_row = 0
            else:
                broken, in_a_row = broken + 1, in_a_row + 1
            tokens += batch.tokens
            rest(time.perf_counter() - begun_s)
            if in_a_row == MAX_BROKEN_STEPS:
                break
        self.reservoir.arrived(queue)
        for text in fresh:
            self.reservoir.add(text, rng)
        self.updates, self.at_step = self.updates + 1, 0
        return UpdateReport(broken, loss, alpha, tokens, masked)

    def _texts(self, queue: list[ServedText], step: int, rng: random.Random) -> list[ServedText]:
        older = self.reservoir.sample(round(self.config.replay * self.config.batch), rng)
        num_fresh = self.config.batch - len(older)
        # Few fresh texts are not repeated within a batch; over the steps all get their turn.
        picked = [
            queue[(step * num_fresh + index) % len(queue)]
            for index in range(min(num_fresh, len(queue)))
        ]
        return picked + older

    def _rows(self, texts: Sequence[ServedText], rng: random.Random) -> list[LearningRow]:
        rows = [
            LearningRow(
                text_row(text, self.config.positions),
                # What was trimmed off is no text.
                [DraftedSpan(one, 0, len(one.committed)) for one in text.records],
                text.records,
            )
            for text in texts
        ]
        if "later-rejected" in self.config.positions:
            found = [one for text in texts for one in branched(text)]
            rows += [
                LearningRow(row, [DraftedSpan(record, record.accepted + 1, len(record.drafted))])
                for record, row in rng.sample(found, min(MOST_BRANCHES, len(found)))
            ]
        length = min(self.config.max_length, self.target.max_positions)
        return [one._replace(row=one.row.cut(length)) for one in rows]

    def _step(self, batch: LearningBatch) -> StepSums | None:
        """Takes one step. None, and nothing changed, when the gradient is not finite."""
        lr = self.config.lr * min(1.0, (self.steps + 1) / max(1, self.config.warmup_steps))
        sums = self.optimizer.step(batch, lr=lr)
        if sums is not None:
            self.steps += 1
            self._average()
        return sums

    @torch.no_grad()
    def _average(self) -> None:
        """Updates the mean of the weights: at a constant rate the last weights stay noisy, their
        mean does not. A young mean decays faster, so that it soon leaves where it began."""
        if self.config.average == 0:
            return
        if not self.average:
            self.average = self._copies()
            return
        decay = min(self.config.average, (1 + self.steps) / (10 + self.steps))
        for name, parameter in self.parameters.items():
            self.average[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[torch.nn.Module]:
        """Draft as it is scored and published: inside it has the mean of its weights, afterwards
        its own again."""
        self._exchange()
        try:
            yield self.drafter
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, average in self.average.items():
            held = self.parameters[name].detach().clone()
            self.parameters[name].copy_(average)
            average.copy_(held)


def taps_share(config: LearnConfig) -> float:
    """Bytes of hidden states that each of the four lists of texts may hold."""
    return config.taps_gib * 2**30 / 4


def summary(sums: StepSums) -> tuple[float, list[float]]:
    weight = sums.weight.clamp(min=1e-9)
    loss = float(sums.divergence.sum() / weight.sum())
    return loss, (sums.alpha / weight).tolist()


Trained = dict[str, torch.nn.Parameter]  # by name
BETAS = (0.9, 0.999)
MAX_GRAD_NORM = 1.0


class CandidateOptimizer:
    """AdamW, or Muon with it, over the trained parameters of `drafter`, whose weights may change
    between steps."""

    def __init__(self, drafter: torch.nn.Module, config: LearnConfig):
        self.drafter, self.config = drafter, config
        self.device = next(drafter.parameters()).device
        self.in_bf16 = computes_in_bf16(config.dtype, self.device)
        self.forget()

    def step(self, batch: LearningBatch, *, lr: float) -> StepSums | None:
        """One step on the batch's token mean. None, and nothing changed, when the gradient is not
        finite."""
        self.adam.zero_grad(set_to_none=True)
        sums = self._backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(trained(self.drafter).values(), MAX_GRAD_NORM)
        if not bool(torch.isfinite(norm)):
            self.adam.zero_grad(set_to_none=True)
            return None
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        return sums

    def _backward(self, batch: LearningBatch) -> StepSums:
        unrolled = self.unrolled(batch)
        unrolled.mean(batch.weight).backward()
        return unrolled.sums

    def unrolled(self, batch: LearningBatch) -> UnrolledLoss:
        with autocast(self.device, torch.bfloat16, enabled=self.in_bf16):
            return unrolled_loss(
                self.drafter,
                batch.source,
                batch.text,
                num_steps=self.config.unroll.steps,
                decay=self.config.unroll.decay,
                kind=kind_of(self.config.divergence),
            )

    def moments(self) -> dict[str, torch.Tensor]:
        """Optimizer state as "<parameter>:<moment>", which `fill` takes back."""
        return {
            f"{name}:{key}": value
            for name, parameter in trained(self.drafter).items()
            for key, value in part_of(self.adam, parameter).state.get(parameter, {}).items()
        }

    def fill(self, moments: Mapping[str, torch.Tensor]) -> None:
        """Moments of another optimizer than the one at hand are left out."""
        self.forget()
        parameters = trained(self.drafter)
        for key, value in moments.items():
            name, _, moment = key.rpartition(":")
            part = part_of(self.adam, parameters[name])
            if (moment == MUON_MOMENT) == isinstance(part, torch.optim.Muon):
                on_host = moment == "step" and not part.param_groups[0].get("fused")
                device = "cpu" if on_host else parameters[name].device
                part.state.setdefault(parameters[name], {})[moment] = value.to(device)

    def forget(self) -> None:
        """Returns to the state before the first step."""
        if self.config.optimizer == "muon":
            self.adam: torch.optim.Optimizer = muon_with_adamw(
                self.drafter,
                num_tokens=len(self.drafter.head_weight()),
                lr=self.config.lr,
                betas=BETAS,
                weight_decay=0.0,
            )
            return
        self.adam = torch.optim.AdamW(
            trained(self.drafter).values(),
            lr=self.config.lr,
            betas=BETAS,
            weight_decay=0.0,
            # One pass over each tensor. On an accelerator torch chooses.
            fused=True if reads_freely(self.device) else None,
        )


def computes_in_bf16(dtype: str, device: torch.device) -> bool:
    """True where the arithmetic of `learn.dtype` is bfloat16."""
    if dtype == "auto":
        return fast_at_bf16(device)
    return dtype == "bfloat16"


def trained(drafter: torch.nn.Module) -> Trained:
    return {
        name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad
    }
