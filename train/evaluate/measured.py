"""tau and alpha_i of a draft while it trains: measured by real lossless decoding of held-out
prompts, and predicted by teacher forcing on the very texts that the decoding wrote. Both carry 95 %
intervals over prompts.

The two share their texts, so they differ by the luck of single rounds alone: a gap beyond the
intervals is a fault.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.speculate import SpeculatedText, speculate
from draftsmith.drafters.target.target import Target
from draftsmith.files import as_values
from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.progress import Progress, say
from draftsmith.train.checkpoints import BestDraft, RunFolder
from draftsmith.train.config import TrainConfig
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.teacher_forced import (
    Counts,
    DocumentCounts,
    DraftRule,
    Estimate,
    Evaluation,
    acceptance,
    count_documents,
    merge_documents,
    summarise,
    tau_of,
)

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class MeasuredRates:
    """Counts and rates of the rounds at one temperature. Entry i of the lists is about draft
    position i + 1."""

    rounds: int
    tokens: int  # committed in them
    tau: Estimate
    alpha: list[Estimate | None]  # accepted / offered; None where nothing was offered
    offered: list[int]
    accepted: list[int]
    method: str = "real lossless decoding of held-out prompts, bootstrap over prompts"


@dataclass(frozen=True)
class Measurement:
    measured: MeasuredRates
    predicted: Evaluation

    def to_dict(self) -> dict[str, Any]:
        """Predicted figures, and the measured ones beside them."""
        return as_values(self.predicted) | {"measured": as_values(self.measured)}

    def figures(self) -> dict[str, float]:
        """Entries of a line of metrics; names end in _t0 or _t1."""
        end = f"_t{self.predicted.temperature:g}"
        found = _bounded(f"tau{end}", self.measured.tau) | _bounded(
            f"predicted_tau{end}", self.predicted.tau
        )
        for at, alpha in enumerate(self.measured.alpha):
            if alpha is not None:
                found |= {
                    f"alpha_{at + 1}{end}": alpha.value,
                    f"offered_{at + 1}{end}": self.measured.offered[at],
                }
        return found

    def summary(self) -> str:
        measured, predicted = self.measured.tau, self.predicted.tau
        return (
            f"T={self.predicted.temperature:g} tau {measured.value:.2f} (predicted "
            f"{predicted.value:.2f})"
        )


# What happened to each document's prompts, by the number of the temperature and of the data folder,
# and its name.
ByPrompt = dict[tuple[int, int, str], AcceptanceCounts]


class Figures(NamedTuple):
    """Figures of a draft at all temperatures."""

    prompts: int
    measurements: list[Measurement]
    counts: ByPrompt

    @property
    def tau(self) -> Estimate:
        """Tokens per round over all temperatures, by which the best draft is chosen."""
        return tau_of(_documents(self.counts))

    def tau_by_folder(self) -> dict[int, Estimate]:
        """The same of each of several data folders, by its number."""
        folders = sorted({folder for _, folder, _ in self.counts})
        if len(folders) < 2:
            return {}
        return {folder: tau_of(_documents(self.counts, folder=folder)) for folder in folders}

    def for_metrics(self) -> dict[str, float]:
        found = _bounded("tau", self.tau)
        for folder, tau in self.tau_by_folder().items():
            found[f"tau_folder_{folder + 1}"] = tau.value
        for measurement in self.measurements:
            found |= measurement.figures()
        return found

    def summary(self) -> str:
        return ", ".join(measurement.summary() for measurement in self.measurements)


def measure(
    drafter: TrainedDrafter,
    target: Target,
    sequences: Sequence[TokenSequence],
    *,
    k: int,
    max_new_tokens: int,
    batch_size: int,
    within_s: float = math.inf,
    now_s: Callable[[], float] = time.monotonic,
    progress: Callable[[int], object] = lambda done: None,
) -> Figures:
    """Decodes the prompts of `sequences` at every temperature; what the target once answered to
    them is not read.

    Args:
        within_s: seconds to take by the clock `now_s`; the first prompt is measured whatever it
            takes, others as far as they fit.
        progress: is called with the number of answers so far.
    """
    counts: ByPrompt = defaultdict(AcceptanceCounts)
    predicted: list[list[DocumentCounts]] = [[] for _ in TEMPERATURES]
    prompts = 0
    for part in parts(sequences, batch_size, within_s=within_s, now_s=now_s):
        for at, temperature in enumerate(TEMPERATURES):
            texts = speculate(
                drafter,
                target,
                [prompt_of(sequence).tolist() for sequence in part],
                k=k,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                seeds=list(range(prompts, prompts + len(part))),
            ).texts
            for sequence, text in zip(part, texts, strict=True):
                counts[at, sequence.folder, sequence.name].merge(text.counts())
            written = [sequence_of(one.name, text) for one, text in zip(part, texts, strict=True)]
            predicted[at] += count_documents(
                drafter, target, written, DraftRule(temperature, k), batch_size=batch_size
            )
            progress(prompts * len(TEMPERATURES) + len(part) * (at + 1))
        prompts += len(part)
    measurements = [
        Measurement(
            _measured(counts, at),
            summarise(merge_documents(predicted[at]), DraftRule(temperature, k)),
        )
        for at, temperature in enumerate(TEMPERATURES)
    ]
    return Figures(prompts, measurements, dict(counts))


def parts(
    sequences: Sequence[TokenSequence],
    batch_size: int,
    *,
    within_s: float,
    now_s: Callable[[], float],
) -> Iterator[Sequence[TokenSequence]]:
    """Batches of the sequences, as many as fit. Where the time counts, the first is of one prompt,
    and the next of twice as many while that is sure to fit."""
    end_s, at = now_s() + within_s, 0
    size = batch_size if math.isinf(within_s) else 1
    while at < len(sequences):
        begun_s = now_s()
        yield sequences[at : at + size]
        at, ended_s = at + size, now_s()
        took_s, left_s = ended_s - begun_s, end_s - ended_s
        if took_s > left_s:
            return
        if 2 * took_s <= left_s:
            size = min(2 * size, batch_size)


def prompt_of(sequence: TokenSequence) -> torch.Tensor:
    """Tokens before the first one that the target wrote; at least one token."""
    return sequence.input_ids[: max(1, int(sequence.loss_mask.int().argmax()))]


def sequence_of(name: str, text: SpeculatedText) -> TokenSequence:
    ids = torch.tensor(text.tokens)
    return TokenSequence(name, ids, torch.arange(len(ids)) >= text.num_prompt)


def _measured(counts: ByPrompt, temperature: int) -> MeasuredRates:
    """Rates at the temperature of this number."""
    documents = _documents(counts, temperature=temperature)
    found, total = acceptance(documents), AcceptanceCounts()
    for (at, *_), one in counts.items():
        if at == temperature:
            total.merge(one)
    return MeasuredRates(
        rounds=total.rounds,
        tokens=total.num_committed,
        tau=found.tau,
        alpha=found.alpha,
        offered=total.offered,
        accepted=total.accepted,
    )


def _documents(
    counts: ByPrompt, *, temperature: int | None = None, folder: int | None = None
) -> list[Counts]:
    """Counts of each name, at one temperature and of one folder where these are given."""
    by_name: dict[str, AcceptanceCounts] = defaultdict(AcceptanceCounts)
    for (at, its_folder, name), one in counts.items():
        if temperature in (None, at) and folder in (None, its_folder):
            by_name[name].merge(one)
    return [
        Counts(one.rounds, one.num_committed, one.offered, one.accepted) for one in by_name.values()
    ]


def _bounded(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


SHARE = 0.1  # of --minutes, at most, for one evaluation


class HeldOut:
    """Called, it gives figures of the draft as it is at a step, which is kept if it is the best so
    far; None without held-out prompts. Later evaluations read the prompts that the first had time
    for.

    Every rank does the same, because a target that is spread over them runs on all of them only.
    """

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        sequences: Sequence[TokenSequence],
        now_s: Callable[[], float],
    ):
        """`now_s` is the same on every rank."""
        self.config, self.target, self.sequences, self.now_s = config, target, sequences, now_s
        minutes = math.inf if config.minutes is None else config.minutes
        self.within_s = SHARE * minutes * 60
        self.shows = os.environ.get("RANK", "0") == "0"

    def expected_s(self, drafter: torch.nn.Module) -> float:
        """Most time that the evaluation after the last step may take: that of one prompt, for
        each of them. 0 where no time was set."""
        if not self.sequences or math.isinf(self.within_s):
            return 0.0
        if self.shows:
            say("timing the evaluation of one held-out prompt")
        begun_s = self.now_s()
        self._measured(drafter.eval(), self.sequences[:1])
        return min(self.within_s, (self.now_s() - begun_s) * len(self.sequences))

    def __call__(self, drafter: torch.nn.Module, step: int) -> Figures | None:
        if not self.sequences:
            return None
        count = len(self.sequences)
        total = count * len(TEMPERATURES)
        progress = Progress("evaluate", total, unit="answers", shows=self.shows)
        clock: dict[str, Any] = {"within_s": self.within_s, "now_s": self.now_s}
        figures = self._measured(drafter, self.sequences, progress=progress.update, **clock)
        self.sequences = self.sequences[: figures.prompts]
        if self.shows:
            fewer = f"only {figures.prompts} of {count} prompts: it may take a tenth of --minutes"
            progress.close(fewer if figures.prompts < count else "")
            evaluation = [measurement.to_dict() for measurement in figures.measurements]
            BestDraft(RunFolder(self.config.out).training).offer(
                drafter, step=step, tau=figures.tau.value, evaluation=evaluation
            )
        return figures

    def _measured(
        self, drafter: Any, sequences: Sequence[TokenSequence], **options: Any
    ) -> Figures:
        return measure(
            drafter,
            self.target,
            sequences,
            k=self.config.unroll.steps,
            max_new_tokens=self.config.eval_tokens,
            batch_size=self.config.batch_size,
            **options,
        )
