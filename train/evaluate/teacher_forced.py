"""alpha_i and tau of a draft on the target's own text, exactly, with 95 % intervals over documents.

Nothing is drafted: every (anchor, depth) is teacher-forced at once, and the rounds that would have
emitted the text are counted in expectation. Figures have 95 % intervals, also by the length of the
context: of the rounds that begin with so many tokens before them. A round belongs to the bucket
that it begins in, with all that it commits, as the server counts it: sums over the buckets are
those of the whole text. B rows, L tokens per row, S depths, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.interface import TextBatch, TrainedDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import bootstrap_ratio, bounds_of, bucket_of
from draftsmith.kernels.overlap import WalkedRounds, keep_probability, walk_rounds
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.vocabulary import scatter_to_target_vocab
from draftsmith.progress import Progress
from draftsmith.train.data.batches import collate
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.objective.rounds_of_text import answers, deepen, stretches
from draftsmith.train.objective.unrolled_loss import PredictedStep, scatter, select

CHUNK_ELEMENTS = 1 << 24  # processed logits held at once, per distribution
NEAR_TIE = 64  # steps of rounding between two logits that another batch may turn round

METHOD = (
    "teacher-forced on the target's own text, exact expectation over rounds, bootstrap over "
    "documents"
)


class Estimate(NamedTuple):
    value: float
    low: float
    high: float


class Acceptance(NamedTuple):
    tau: Estimate
    alpha: list[Estimate | None]  # entry i is alpha_(i+1); None where no round reaches it


class Counts(NamedTuple):
    """Sums over rounds of a document, expected or counted."""

    rounds: float
    committed: float
    offered: list[float] | list[int]  # [K]
    accepted: list[float] | list[int]  # [K]

    def plus(self, other: Counts) -> Counts:
        return Counts(
            self.rounds + other.rounds,
            self.committed + other.committed,
            [a + b for a, b in zip(self.offered, other.offered, strict=True)],
            [a + b for a, b in zip(self.accepted, other.accepted, strict=True)],
        )


def acceptance(documents: Sequence[Counts], seed: int = 0) -> Acceptance:
    """Ratios of the sums, with intervals over the documents. One whose rounds never reach a depth
    says nothing about it."""
    alpha: list[Estimate | None] = []
    for depth in range(max(len(one.offered) for one in documents)):
        reached = [one for one in documents if len(one.offered) > depth and one.offered[depth] > 0]
        offered = [one.offered[depth] for one in reached]
        accepted = [one.accepted[depth] for one in reached]
        alpha.append(ratio(accepted, offered, seed) if reached else None)
    return Acceptance(tau_of(documents, seed), alpha)


def tau_of(documents: Sequence[Counts], seed: int = 0) -> Estimate:
    return ratio([one.committed for one in documents], [one.rounds for one in documents], seed)


def ratio(top: Sequence[float], bottom: Sequence[float], seed: int) -> Estimate:
    """sum(top) / sum(bottom) with a 95 % interval over their pairs."""
    interval = bootstrap_ratio(top, bottom, seed=seed)
    return Estimate(sum(top) / sum(bottom), interval.low, interval.high)


ByContext = Mapping[int, Counts]  # by number of the bucket


class ContextFigures(NamedTuple):
    """Figures of one bucket [begin, end) of context lengths, in tokens."""

    begin: int
    end: int
    documents: int
    rounds: float
    tokens: float  # committed in them
    tau: Estimate
    alpha: list[Estimate | None]  # as in `Acceptance`


@dataclass(frozen=True)
class Evaluation:
    """Figures at one temperature. Entry i of `alpha` is alpha_(i+1): kept, given that everything
    before it in the round was."""

    temperature: float
    k: int
    documents: int
    tokens: int
    rounds: float
    tau: Estimate
    alpha: list[Estimate | None]  # None where no round reaches that position
    # share of tokens to which the target's distribution here gives no mass: 0 but for numerical
    # ties, else foreign text
    unlikely: float
    by_context: list[ContextFigures]  # the shortest contexts first
    # "sampled": drafts are drawn from the draft's distribution; "greedy": its likeliest token
    draft_sampling: str = "sampled"
    method: str = METHOD


def temperature_of(text: TokenSequence, provenance: dict[str, Any], target: Target) -> float | None:
    """The temperature whose distribution a text of this data follows exactly; None for filtered
    samples and for another target's."""
    temperature = provenance.get("temperature")
    if isinstance(temperature, list):
        # Stored in fewer digits.
        own = text.temperature
        alike = [
            one for one in temperature if own is not None and math.isclose(one, own, rel_tol=1e-6)
        ]
        temperature = alike[0] if alike else None
    unfiltered = provenance.get("top_k") == 0 and provenance.get("top_p") == 1
    if provenance.get("target_revision") != target.revision or not (unfiltered or temperature == 0):
        return None
    return temperature


class KeptText(NamedTuple):
    keep: torch.Tensor  # [B, L, S]
    unlikely: torch.Tensor  # [B, L] bool


class DocumentCounts(NamedTuple):
    name: str
    tokens: int
    unlikely: int
    by_context: ByContext

    @property
    def whole(self) -> Counts:
        """Sums of all buckets together."""
        return functools.reduce(Counts.plus, self.by_context.values())


class DraftRule(NamedTuple):
    """Temperature, tokens a round and choice of the drafts that a text is counted by."""

    temperature: float
    k: int
    sampling: str = "sampled"  # as `Evaluation.draft_sampling`

    @property
    def temperatures(self) -> tuple[float, float]:
        """Temperatures of the target's distributions and of the draft's."""
        return self.temperature, 0.0 if self.sampling == "greedy" else self.temperature


@torch.no_grad()
def count_documents(
    drafter: TrainedDrafter,
    target: Target,
    sequences: Sequence[TokenSequence],
    rule: DraftRule,
    *,
    batch_size: int = 8,
    label: str = "",
) -> list[DocumentCounts]:
    """One entry a name that wrote something, in order of length. `sequences` must be the target's
    own text at the temperature: its greedy answers for 0, unfiltered samples otherwise. `label` of
    a bar, if any."""
    if not sequences:
        raise ValueError("no sequence to evaluate on; give at least one")
    counts: list[DocumentCounts] = []
    ordered = sorted(sequences, key=lambda sequence: len(sequence.input_ids))
    progress = Progress(label, len(ordered), unit="answers", shows=bool(label))
    for begin in range(0, len(ordered), batch_size):
        part = ordered[begin : begin + batch_size]
        text = collate(part)
        kept = kept_text(drafter, target, text.to(target.device), rule)
        counts += [
            _document(one.name, kept, row, text.weights[row] > 0) for row, one in enumerate(part)
        ]
        progress.update(begin + len(part))
    progress.close()
    return merge_documents(counts)


def kept_text(
    drafter: TrainedDrafter, target: Target, text: TextBatch, rule: DraftRule
) -> KeptText:
    """The chance that each token of the text is kept at each depth of a round; on the CPU."""
    taps, target_hidden = target.states(text.input_ids, text.attention_mask, drafter.taps)
    keeps, unlikely = [], torch.zeros_like(text.weights, dtype=torch.bool)
    for step in drafter.unroll(text.unrolled(taps, rule.k)):
        predicted = select(step, text)
        before = target_hidden[predicted.row, predicted.position - 1]
        keep, impossible = _compare(drafter, target, before, predicted, rule.temperatures)
        keeps.append(scatter(keep, predicted, text.weights))
        unlikely |= scatter(impossible, predicted, unlikely)
    return KeptText(deepen(torch.stack(keeps, dim=-1), rule.k).cpu(), unlikely.cpu())


def _compare(
    drafter: TrainedDrafter,
    target: Target,
    before: torch.Tensor,
    predicted: PredictedStep,
    temperatures: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(chance that each token is kept [R], whether the target cannot emit it [R]). `before` [R, H]:
    the target's states in front of the tokens. `temperatures` of the target and of the draft."""
    head = predicted.head if predicted.head is not None else drafter.head_weight()
    size = max(1, CHUNK_ELEMENTS // target.vocab_size)
    keeps, impossible = (
        [predicted.weights.new_zeros(0)],
        [torch.zeros(0, dtype=torch.bool, device=head.device)],
    )
    for begin in range(0, len(predicted.tokens), size):
        part = slice(begin, begin + size)
        tokens = predicted.tokens[part]
        p_rows, q_rows = (
            SamplingRows.of([one] * len(tokens), device=tokens.device) for one in temperatures
        )
        logits = target.head(before[part])
        p_logits = process(logits, p_rows)
        draft_logits = predicted.hidden[part] @ head.T.to(predicted.hidden.dtype)
        q_logits = process(
            scatter_to_target_vocab(draft_logits.float(), drafter.vocab_map, target.vocab_size),
            q_rows,
        )
        keeps.append(keep_probability(p_logits, q_logits, tokens))
        lost, behind = (one.gather(1, tokens[:, None])[:, 0] for one in (p_logits, logits))
        tied = logits.amax(dim=1) - behind <= NEAR_TIE * torch.finfo(before.dtype).eps
        impossible.append((lost == -torch.inf) & ~tied)
    return torch.cat(keeps), torch.cat(impossible)


def _document(name: str, kept: KeptText, row: int, loss_mask: torch.Tensor) -> DocumentCounts:
    texts = answers(kept.keep[row], loss_mask)
    walks = [walk_rounds(text) for text in texts]
    begins = [begin for begin, _ in stretches(loss_mask)]
    contexts = [count_by_context(*pair) for pair in zip(walks, begins, strict=True)]
    return DocumentCounts(
        name=name,
        tokens=sum(len(text) for text in texts),
        unlikely=int(kept.unlikely[row].sum()),
        by_context=functools.reduce(merge_contexts, contexts, {}),
    )


def merge_documents(counts: Sequence[DocumentCounts]) -> list[DocumentCounts]:
    """One entry a name: several answers to one prompt depend on each other and are resampled
    together."""
    merged: dict[str, DocumentCounts] = {}
    for count in counts:
        if count.name in merged:
            old = merged[count.name]
            count = DocumentCounts(
                count.name,
                old.tokens + count.tokens,
                old.unlikely + count.unlikely,
                merge_contexts(old.by_context, count.by_context),
            )
        merged[count.name] = count
    return [count for count in merged.values() if count.tokens]


def count_by_context(walked: WalkedRounds, begin: int) -> dict[int, Counts]:
    """Counts of a text whose first token stands at position `begin`."""
    found: dict[int, Counts] = {}
    for bucket in range(bucket_of(begin), bucket_of(begin + len(walked.rounds) - 1) + 1):
        first, end = bounds_of(bucket)
        part = slice(max(0, first - begin), end - begin)
        found[bucket] = Counts(
            float(walked.rounds[part].sum()),
            float(walked.committed[part].sum()),
            walked.offered[part].sum(dim=0).tolist(),
            walked.accepted[part].sum(dim=0).tolist(),
        )
    return found


def merge_contexts(some: ByContext, others: ByContext) -> dict[int, Counts]:
    merged = dict(some)
    for bucket, counts in others.items():
        merged[bucket] = merged[bucket].plus(counts) if bucket in merged else counts
    return merged


def summarise_contexts(documents: Sequence[ByContext], seed: int) -> list[ContextFigures]:
    """Figures of each bucket that a round begins in, the shortest first; intervals over the
    documents that reach it."""
    by_bucket = {
        # A bucket may begin inside the last round of a text.
        bucket: [one[bucket] for one in documents if bucket in one and one[bucket].rounds > 0]
        for bucket in sorted(set().union(*documents))
    }
    return [
        ContextFigures(
            *bounds_of(bucket),
            len(counts),
            sum(one.rounds for one in counts),
            sum(one.committed for one in counts),
            *acceptance(counts, seed),
        )
        for bucket, counts in by_bucket.items()
        if counts
    ]


def summarise(counts: Sequence[DocumentCounts], rule: DraftRule, *, seed: int = 0) -> Evaluation:
    tokens = sum(count.tokens for count in counts)
    documents = [count.whole for count in counts]
    whole = acceptance(documents, seed)
    return Evaluation(
        temperature=rule.temperature,
        k=rule.k,
        documents=len(counts),
        tokens=tokens,
        rounds=sum(one.rounds for one in documents),
        tau=whole.tau,
        alpha=whole.alpha,
        unlikely=sum(count.unlikely for count in counts) / tokens,
        by_context=summarise_contexts([count.by_context for count in counts], seed),
        draft_sampling=rule.sampling,
    )
