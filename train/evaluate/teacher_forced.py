"""alpha_i and tau of a draft on the target's own text, exactly, with 95 % intervals over documents.

Nothing is drafted: every (anchor, depth) is teacher-forced at once, and the rounds that would have
emitted the text are counted in expectation. B rows, L tokens per row, S depths, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import expected_rounds, keep_probability, walk_rounds
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.vocabulary import scatter_to_target_vocab
from draftsmith.progress import Progress
from draftsmith.train.data.batches import collate
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.estimate import (
    Acceptance,
    ByContext,
    ContextFigures,
    Estimate,
    count_by_context,
    merge_contexts,
    ratio,
    reached_ratio,
    summarise_contexts,
)
from draftsmith.train.objective.rounds_of_text import answers, deepen, stretches
from draftsmith.train.objective.unrolled_loss import PredictedStep, Unrollable, scatter, select

CHUNK_ELEMENTS = 1 << 24  # processed logits held at once, per distribution

METHOD = (
    "teacher-forced on the target's own text, exact expectation over rounds, bootstrap over "
    "documents"
)


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
    tau_by_k: list[float]  # tau when only 1, 2, ... k tokens are drafted
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
    rounds_by_k: list[float]
    offered: list[float]
    accepted: list[float]
    by_context: ByContext = MappingProxyType({})


def evaluate_draft(
    drafter: Unrollable,
    target: Target,
    sequences: Sequence[TokenSequence],
    *,
    temperature: float,
    k: int,
    batch_size: int = 8,
    seed: int = 0,
    draft_sampling: str = "sampled",
) -> Evaluation:
    """`sequences` must be the target's own text at this temperature: its greedy answers for 0,
    unfiltered samples otherwise."""
    counts = count_documents(
        drafter,
        target,
        sequences,
        temperature=temperature,
        k=k,
        batch_size=batch_size,
        draft_sampling=draft_sampling,
    )
    return summarise(counts, temperature=temperature, k=k, seed=seed, draft_sampling=draft_sampling)


@torch.no_grad()
def count_documents(
    drafter: Unrollable,
    target: Target,
    sequences: Sequence[TokenSequence],
    *,
    temperature: float,
    k: int,
    batch_size: int = 8,
    draft_sampling: str = "sampled",
    label: str = "",
) -> list[DocumentCounts]:
    """One entry a name that wrote something, in order of length. `label` of a bar, if any."""
    if not sequences:
        raise ValueError("no sequence to evaluate on; give at least one")
    counts: list[DocumentCounts] = []
    ordered = sorted(sequences, key=lambda sequence: len(sequence.input_ids))
    progress = Progress(label, len(ordered), unit="texts", shows=bool(label))
    for begin in range(0, len(ordered), batch_size):
        part = ordered[begin : begin + batch_size]
        counts += _count(
            drafter,
            target,
            part,
            temperature=temperature,
            k=k,
            draft_temperature=0.0 if draft_sampling == "greedy" else temperature,
        )
        progress.update(begin + len(part))
    progress.close()
    return merge_documents(counts)


def _count(
    drafter: Unrollable,
    target: Target,
    sequences: Sequence[TokenSequence],
    *,
    temperature: float,
    k: int,
    draft_temperature: float,
) -> list[DocumentCounts]:
    text = collate(sequences)
    is_counted = text.weights > 0
    text = text.to(target.device)
    kept = kept_text(
        drafter, target, text, temperature=temperature, k=k, draft_temperature=draft_temperature
    )
    kept = KeptText(*(part.cpu() for part in kept))
    return [
        _document(sequence.name, kept, row, is_counted[row], k)
        for row, sequence in enumerate(sequences)
    ]


def kept_text(
    drafter: Unrollable,
    target: Target,
    text: TextBatch,
    *,
    temperature: float,
    k: int,
    draft_temperature: float,
) -> KeptText:
    """The chance that each token of the text is kept at each depth of a round, under the target's
    distributions at `temperature` and the draft's at `draft_temperature`."""
    taps, target_hidden = target.states(text.input_ids, text.attention_mask, drafter.taps)
    keeps, unlikely = [], torch.zeros_like(text.weights, dtype=torch.bool)
    for step in drafter.unroll(text.unrolled(taps, k)):
        predicted = select(step, text)
        before = target_hidden[predicted.row, predicted.position - 1]
        keep, impossible = _compare(
            drafter, target, before, predicted, (temperature, draft_temperature)
        )
        keeps.append(scatter(keep, predicted, text.weights))
        unlikely |= scatter(impossible, predicted, unlikely)
    return KeptText(deepen(torch.stack(keeps, dim=-1), k), unlikely)


def _compare(
    drafter: Unrollable,
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
        p_logits = process(target.head(before[part]), p_rows)
        draft_logits = predicted.hidden[part] @ head.T.to(predicted.hidden.dtype)
        q_logits = process(
            scatter_to_target_vocab(draft_logits.float(), drafter.vocab_map, target.vocab_size),
            q_rows,
        )
        keeps.append(keep_probability(p_logits, q_logits, tokens))
        impossible.append(p_logits.gather(1, tokens[:, None])[:, 0] == -torch.inf)
    return torch.cat(keeps), torch.cat(impossible)


def _document(
    name: str, kept: KeptText, row: int, loss_mask: torch.Tensor, k: int
) -> DocumentCounts:
    texts = answers(kept.keep[row], loss_mask)
    walks = [walk_rounds(text) for text in texts]
    begins = [begin for begin, _ in stretches(loss_mask)]
    contexts = [count_by_context(*pair) for pair in zip(walks, begins, strict=True)]
    return DocumentCounts(
        name=name,
        tokens=sum(len(text) for text in texts),
        unlikely=int(kept.unlikely[row].sum()),
        rounds_by_k=[
            sum(expected_rounds(text[:, :depth]) for text in texts) for depth in range(1, k + 1)
        ],
        offered=_summed([walk.offered for walk in walks], k),
        accepted=_summed([walk.accepted for walk in walks], k),
        by_context=functools.reduce(merge_contexts, contexts, {}),
    )


def _summed(parts: Sequence[torch.Tensor], k: int) -> list[float]:
    """Sums [k] over all rows of [n, k] each."""
    return torch.cat([*parts, torch.zeros(1, k, dtype=torch.float64)]).sum(dim=0).tolist()


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
                rounds_by_k=_added(old.rounds_by_k, count.rounds_by_k),
                offered=_added(old.offered, count.offered),
                accepted=_added(old.accepted, count.accepted),
                by_context=merge_contexts(old.by_context, count.by_context),
            )
        merged[count.name] = count
    return [count for count in merged.values() if count.tokens]


def _added(some: list[float], others: list[float]) -> list[float]:
    return [a + b for a, b in zip(some, others, strict=True)]


def summarise(
    counts: Sequence[DocumentCounts],
    *,
    temperature: float,
    k: int,
    seed: int,
    draft_sampling: str = "sampled",
) -> Evaluation:
    tokens = sum(count.tokens for count in counts)
    rounds = [sum(count.rounds_by_k[depth] for count in counts) for depth in range(k)]
    whole = Acceptance(
        ratio(
            [count.tokens for count in counts], [count.rounds_by_k[-1] for count in counts], seed
        ),
        [_alpha(counts, depth, seed) for depth in range(k)],
    )
    return Evaluation(
        temperature=temperature,
        k=k,
        documents=len(counts),
        tokens=tokens,
        rounds=rounds[-1],
        tau=whole.tau,
        alpha=whole.alpha,
        tau_by_k=[tokens / value for value in rounds],
        unlikely=sum(count.unlikely for count in counts) / tokens,
        by_context=summarise_contexts([count.by_context for count in counts], seed, whole=whole),
        draft_sampling=draft_sampling,
    )


def _alpha(counts: Sequence[DocumentCounts], depth: int, seed: int) -> Estimate | None:
    # A document whose rounds never reach this depth says nothing about it.
    return reached_ratio(
        [count.accepted[depth] for count in counts],
        [count.offered[depth] for count in counts],
        seed,
    )
