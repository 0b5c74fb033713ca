"""Checks that a target can be trained for and served, and that a draft fits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.checkpoint import RECORD, locate, read_metadata
from draftsmith.drafters.compiled.captured import capture_lm
from draftsmith.drafters.config import Pair
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.layouts.folder import flattened
from draftsmith.drafters.target.taps import FINAL
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import read_config
from draftsmith.errors import UserError
from draftsmith.kernels.dispatch import reads_freely
from draftsmith.kernels.host_compiler import compiler_path
from draftsmith.kernels.measured import CHOICES
from draftsmith.train.check.finding import Finding, fail, ok, refused, warn


def check_target(target: Target, *, laid_out: bool = True) -> list[Finding]:
    """Loading has already shown that the target uses our attention and that its head is found.
    `laid_out`: all weights are in memory."""
    shape = (
        f"{target.num_layers} layers of {target.hidden_size}, {target.vocab_size} ids, "
        f"{target.max_positions} positions"
    )
    dtype = str(target.dtype).removeprefix("torch.")
    return [
        ok("target.loads", f"{type(target.model).__name__}, {shape}, {dtype}"),
        check_finite(target),
        *check_rope(target),
        check_tokenizer(target),
        check_compiler(),
        *(check_ways(target) if laid_out else []),
    ]


@torch.no_grad()
def check_finite(target: Target) -> Finding:
    """Logits of a short text over the whole range of ids."""
    length = min(64, target.max_positions)
    ids = torch.linspace(0, target.vocab_size - 1, length, device=target.device).long()[None]
    _, hidden = target.states(ids, torch.ones_like(ids), ())
    logits = target.head(hidden).float()
    if torch.isfinite(logits).all():
        return ok("target.finite", f"logits between {logits.min():.3g} and {logits.max():.3g}")
    mend = "load the target in float32 or bfloat16, or fetch it again"
    return fail("target.finite", "logits hold NaN or infinite values", mend)


def check_rope(target: Target) -> list[Finding]:
    """Finds rotary frequencies that limit the context; a model whose frequencies never change has
    no finding."""
    longest, limit = target.num_positions, target.rope_limit
    if limit is None or limit.positions >= longest:
        return []
    what = (
        f"loaded so, it is right for up to {limit.positions} of its {longest} positions: "
        f"{limit.reason(target.name)}"
    )
    mend = (
        f"give --max-length {limit.positions}, or one above it to serve, train and eval alike, "
        "which gives every text the factors of long ones"
    )
    return [warn("target.rope", what, mend)]


def check_tokenizer(target: Target) -> Finding:
    try:
        tokenizer = target.tokenizer()
    except UserError as error:
        return refused("target.tokenizer", error)
    if len(tokenizer) > target.vocab_size:
        what = f"the tokenizer has {len(tokenizer)} tokens and the model {target.vocab_size} ids"
        return fail("target.tokenizer", what, "use the tokenizer that the model was trained with")
    return ok("target.tokenizer", f"{len(tokenizer)} tokens")


def check_compiler() -> Finding:
    try:
        return ok("kernels.compiler", compiler_path())
    except RuntimeError as error:
        return warn(
            "kernels.compiler",
            f"{error}, so slower operations of torch serve",
            "install g++ or clang++, or name one in CXX",
        )


def check_ways(target: Target) -> list[Finding]:
    """On a CPU, the fastest ways to do the work of a pass, which are timed here where they are not
    known yet."""
    if not reads_freely(target.device):
        return []
    capture_lm(target)
    return [ok("cpu.ways", line) for line in CHOICES.lines()]


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
