"""Checks that a target can be trained for and served."""

from __future__ import annotations

import torch

from draftsmith.drafters.compiled.captured import capture_lm
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
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
    if target.device.type != "cpu":
        return []
    capture_lm(target)
    return [ok("cpu.ways", line) for line in CHOICES.lines()]
