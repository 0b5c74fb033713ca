"""Checks that a target can be trained for and served."""

from __future__ import annotations

from time import perf_counter

import torch

from draftsmith.drafters.compiled.captured import capture_lm
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.measured import CHOICES
from draftsmith.train.doctor.finding import Finding, fail, ok, refused, warn
from draftsmith.train.doctor.memory import GIB, OFFLOADED, parts_of

TOKENS = 16  # of a pass that is timed


def check_target(target: Target) -> list[Finding]:
    """Loading has already shown that the target uses our attention and that its head is found."""
    shape = (
        f"{target.num_layers} layers of {target.hidden_size}, {target.vocab_size} ids, "
        f"{target.max_positions} positions"
    )
    return [
        ok(
            "target.loads",
            f"{type(target.model).__name__}, {shape}, {str(target.dtype).removeprefix('torch.')}",
        ),
        ok(
            "target.attention",
            "keys and values can be kept in a paged pool; logits agree with the model's own "
            "forward",
        ),
        check_finite(target),
        *check_rope(target),
        *check_tokenizer(target),
        check_end(target),
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
    return fail(
        "target.finite",
        "logits hold NaN or infinite values",
        "load the target in float32 or bfloat16, or fetch it again",
    )


def check_ways(target: Target) -> list[Finding]:
    """On a CPU, the fastest ways to do the work of a pass, which are timed here where they are not
    known yet."""
    if target.device.type != "cpu":
        return []
    capture_lm(target)
    return [ok("cpu.ways", line) for line in CHOICES.lines()]


def check_offloaded(target: Target, offload: str) -> Finding:
    """A target whose layers are read for every pass: bytes of them, and the time of a short pass,
    which is nearly all reading."""
    parts = parts_of(target.model)
    ids = torch.arange(TOKENS, device=target.device)[None] % target.vocab_size
    begun_s = perf_counter()
    target.states(ids, torch.ones_like(ids), ())[1].cpu()
    took_ms = 1e3 * (perf_counter() - begun_s)
    return ok(
        "target.offload",
        f"{sum(parts.layers) / GIB:.3g} GiB of layers are {OFFLOADED[offload]} and read for every "
        f"pass, the largest {max(parts.layers) / GIB:.3g} GiB; a pass over {TOKENS} tokens takes "
        f"{took_ms:.0f} ms",
    )


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
    return [
        warn(
            "target.rope",
            what,
            f"give --max-length {limit.positions}, or one above it to serve, train and eval alike, "
            "which gives every text the factors of long ones",
        )
    ]


def check_tokenizer(target: Target) -> list[Finding]:
    try:
        tokenizer = target.tokenizer()
    except UserError as error:
        return [refused("target.tokenizer", error)]
    return [check_size(len(tokenizer), target.vocab_size), check_template(tokenizer.chat_template)]


def check_size(num_tokens: int, vocab_size: int) -> Finding:
    if num_tokens > vocab_size:
        return fail(
            "target.tokenizer",
            f"the tokenizer has {num_tokens} tokens and the model {vocab_size} ids",
            "use the tokenizer that the model was trained with",
        )
    padding = vocab_size - num_tokens
    return ok(
        "target.tokenizer",
        f"{num_tokens} tokens" + (f", {padding} padded ids that no text uses" if padding else ""),
    )


def check_template(template: str | None) -> Finding:
    if template is None:
        return ok(
            "target.template",
            "no chat template: prompts are plain text and /v1/chat/completions is refused",
        )
    return ok("target.template", f"chat template of {len(template)} characters")


def check_end(target: Target) -> Finding:
    if target.eos_token_ids:
        return ok("target.end", f"answers end at token {', '.join(map(str, target.eos_token_ids))}")
    return warn(
        "target.end",
        "no end-of-text token is set",
        "set eos_token_id in the target's config.json, or answers run to their limit",
    )
