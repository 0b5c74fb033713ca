"""Checks that a draft fits a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.drafters.checkpoint import RECORD, locate, read_metadata
from draftsmith.drafters.config import Pair
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.layouts.speculators import flattened
from draftsmith.drafters.target.taps import FINAL
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import read_config
from draftsmith.train.check.finding import Finding, fail, ok, warn


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
        findings.append(check_record(read_metadata(folder), target))
    else:
        mend = "measure it with draftsmith eval before relying on it"
        findings.append(warn("draft.record", f"no {RECORD}: not trained by draftsmith", mend))
    return [*findings, check_positions(folder, target)]


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


def check_record(record: dict[str, Any], target: Target) -> Finding:
    revision = record["target"].get("revision")
    if revision == target.revision:
        return ok("draft.target", f"trained for these weights ({revision})")
    what = f"trained for revision {revision} of its target, this one is {target.revision}"
    mend = "expect a lower acceptance; train on answers of this target, or serve with --learn"
    return warn("draft.target", what, mend)


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
