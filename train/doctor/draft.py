"""Checks that a draft fits a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.checkpoint import RECORD, draft_sampling_of, locate, read_metadata
from draftsmith.drafters.config import Pair
from draftsmith.drafters.interface import TrainedDrafter, UnrollBatch, head_of
from draftsmith.drafters.layouts.speculators import flattened
from draftsmith.drafters.target.taps import FINAL
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import read_config
from draftsmith.train.doctor.finding import Finding, fail, ok, warn


def check_draft(pair: Pair, draft: TrainedDrafter, target: Target) -> list[Finding]:
    """Loading it has already shown that it is whole, finite, and made for this vocabulary and
    tokenizer, or for any."""
    assert pair.draft is not None
    folder = locate(pair.draft, revision=pair.draft_revision)
    vocabulary = (
        "a tokenizer of its own"
        if pair.heterogeneous_vocab
        else "vocabulary and tokenizer of the target"
    )
    findings = [ok("draft.loads", f"{draft.family}, {vocabulary}"), check_taps(draft, target)]
    if pair.heterogeneous_vocab:
        mend = "measure it with draftsmith bench --heterogeneous-vocab before relying on it"
        findings.append(warn("draft.record", "made for no target in particular", mend))
    elif (folder / RECORD).is_file():
        findings += check_record(read_metadata(folder), target)
    else:
        mend = "measure it with draftsmith eval before relying on it"
        findings.append(warn("draft.record", f"no {RECORD}: not trained by draftsmith", mend))
    return [
        *findings,
        check_positions(folder, target),
        check_vocabulary(draft, target),
        check_finite(draft, target),
    ]


def check_taps(draft: TrainedDrafter, target: Target) -> Finding:
    if not draft.taps:
        return ok("draft.taps", "reads no hidden states")
    wrong = [tap for tap in draft.taps if tap != FINAL and not 0 <= tap <= target.num_layers]
    if wrong:
        return fail(
            "draft.taps",
            f"taps {wrong} do not exist in {target.num_layers} layers",
            "train a draft for this target",
        )
    if list(draft.taps) != sorted(set(draft.taps)):
        return warn(
            "draft.taps",
            f"taps {list(draft.taps)} are not in layer order",
            "train with ascending taps: other engines sort them and would misread fc",
        )
    return ok("draft.taps", f"raw layer ids {list(draft.taps)} of {target.num_layers}")


def check_record(record: dict[str, Any], target: Target) -> list[Finding]:
    findings = []
    revision = record["target"].get("revision")
    if revision == target.revision:
        findings.append(ok("draft.target", f"trained for these weights ({revision})"))
    else:
        findings.append(
            warn(
                "draft.target",
                f"trained for revision {revision} of its target, this one is {target.revision}",
                "expect a lower acceptance; train on answers of this target, or serve with --learn",
            )
        )
    measured = [
        f"tau {e['tau']['value']:.2f} at T={e['temperature']:g}"
        + (" (greedy drafts)" if draft_sampling_of(e) == "greedy" else "")
        for e in record.get("evaluation") or []
    ]
    if measured:
        findings.append(ok("draft.evaluation", ", ".join(measured)))
    else:
        findings.append(
            warn(
                "draft.evaluation",
                "its acceptance was never measured",
                "run draftsmith eval --store",
            )
        )
    return findings


def check_positions(folder: Path, target: Target) -> Finding:
    positions = flattened(read_config(folder)).get("max_position_embeddings")
    if positions is not None and positions < target.max_positions:
        return warn(
            "draft.positions",
            f"made for {positions} positions, the target has {target.max_positions}",
            "longer requests go on without a draft; raise max_position_embeddings if its RoPE "
            "allows it",
        )
    return ok("draft.positions", f"reaches the target's {target.max_positions} positions")


def check_vocabulary(draft: TrainedDrafter, target: Target) -> Finding:
    ids = draft.vocab_map
    if ids is None:
        return ok("draft.vocabulary", "drafts every token")
    missing = sorted(set(target.eos_token_ids) - set(ids.tolist()))
    share = len(ids) / target.vocab_size
    what = f"drafts {len(ids)} of {target.vocab_size} tokens ({share:.0%})"
    if missing:
        mend = "train or choose a draft whose vocabulary has it"
        return warn("draft.vocabulary", f"{what}, without the end-of-text token {missing[0]}", mend)
    return ok("draft.vocabulary", what)


@torch.no_grad()
def check_finite(draft: TrainedDrafter, target: Target) -> Finding:
    """Draft logits of a few random tokens at two depths."""
    length = min(16, target.max_positions)
    ids = torch.randint(
        target.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)
    ).to(target.device)
    mask = torch.ones_like(ids)
    taps = target.states(ids, mask, draft.taps)[0] if draft.taps else None
    batch = UnrollBatch(input_ids=ids, attention_mask=mask, taps=taps, num_steps=2)
    if all(
        torch.isfinite(step.hidden @ head_of(step, draft).T).all() for step in draft.unroll(batch)
    ):
        return ok("draft.finite", "drafts finite logits")
    return fail(
        "draft.finite",
        "draft logits hold NaN or infinite values",
        "load it in float32, or go back to an earlier version",
    )
