"""Checks that a target can be trained for and served."""

from __future__ import annotations

import torch

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.doctor.finding import Finding, fail, ok, refused, warn


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
