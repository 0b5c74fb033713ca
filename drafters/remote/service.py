"""The server's part: what a target is, its weights outside its layers or of one layer, and its
states of texts. Only `states` runs the model."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from transformers import PreTrainedConfig

from draftsmith.drafters.remote.messages import DTYPES, FORMAT, StatesOfTexts, Texts
from draftsmith.drafters.target.causal_lm import whole
from draftsmith.drafters.target.quantised import has_numbers, numbers_of
from draftsmith.drafters.target.segments import positions_of
from draftsmith.drafters.target.taps import check_taps
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import tokenizer_hash
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.top_tokens import TopProbs, top_probs

# Positions whose logits exist at the same time.
CHUNK = 512
MOST_TOP = 1024


def described(target: Target, *, max_tokens: int, tokenizer: Any) -> dict[str, Any]:
    """Description that a client compares with its own model before its first text."""
    is_int8 = target.revision != target.loaded_revision
    return {
        "format": FORMAT,
        "name": target.name,
        "revision": target.revision,
        "loaded_revision": target.loaded_revision,
        "same_as": target.same_as,
        "dtype": "int8" if is_int8 else str(target.dtype).removeprefix("torch."),
        "states_dtype": str(target.dtype).removeprefix("torch."),
        "has_long_factors": target.has_long_factors,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
        "max_positions": target.max_positions,
        "pass_bytes": target.pass_bytes(),
        "eos_token_ids": list(target.eos_token_ids),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "config": plain_config(target.model.config),
        "max_tokens": max_tokens,
    }


def plain_config(config: PreTrainedConfig) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))


def weights_of(target: Target, layer: int | None) -> dict[str, torch.Tensor]:
    """Weights of a layer, else those outside of all layers. Each process that holds a share must
    ask for them."""
    return shared_weights(target) if layer is None else layer_weights(target, layer)


@torch.no_grad()
def shared_weights(target: Target) -> dict[str, torch.Tensor]:
    """Parameters and buffers outside the layers, as numbers: embeddings, last norm, head."""
    stack = f"{stack_name(target)}."
    model = target.model
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {
        name: whole(weight)
        for name, weight in held.items()
        if not name.startswith(stack) and has_numbers(weight)
    }
    head = model.get_output_embeddings()
    if not has_numbers(getattr(head, "weight", None)):
        name = next(name for name, module in model.named_modules() if module is head)
        found[f"{name}.weight"] = target.output_weight
    return found


@torch.no_grad()
def layer_weights(target: Target, layer: int) -> dict[str, torch.Tensor]:
    check_layer(target, layer)
    return {name: whole(weight) for name, weight in numbers_of(target.layers[layer]).items()}


def check_layer(target: Target, layer: int) -> None:
    if not 0 <= layer < target.num_layers:
        raise UserError(f"layer is {layer}; the target has the layers 0 to {target.num_layers - 1}")


def stack_name(target: Target) -> str:
    """Name of the list of layers within the model."""
    return next(name for name, module in target.model.named_modules() if module is target.layers)


def check_texts(target: Target, texts: Texts, max_tokens: int) -> None:
    """Raises `UserError` for texts that no pass may read."""
    if texts.num_positions > max_tokens:
        raise UserError(
            f"texts of {texts.num_positions} positions, padding included, are more than the "
            f"{max_tokens} of --states-max-tokens of this server; send fewer or shorter ones"
        )
    longest, most = longest_of(texts), target.max_positions
    if longest > most:
        raise UserError(f"a text has {longest} tokens; the target reads up to {most}")
    if not 0 <= int(texts.ids.min()) <= int(texts.ids.max()) < target.vocab_size:
        raise UserError(f"ids are outside 0 to {target.vocab_size - 1}, the ids of this target")
    if texts.top > MOST_TOP:
        raise UserError(f"top is {texts.top}; ask for at most {MOST_TOP} likeliest tokens")
    if (least := min(texts.taps, default=0)) < 0:
        raise UserError(f"a tap is {least}; give raw layers from 0 on")
    for tap, count in Counter(texts.taps).most_common(1):
        if count > 1:
            raise UserError(f"tap {tap} is asked for {count} times; give each raw layer once")
    check_taps(texts.taps, target.num_layers)


def longest_of(texts: Texts) -> int:
    """Positions of the longest text, its padding included."""
    if texts.segments is not None:
        return int(positions_of(texts.padded(texts.segments, -1)).max()) + 1
    return int(texts.lengths.max()) if texts.apart else texts.width


@torch.no_grad()
def states(target: Target, texts: Texts) -> StatesOfTexts:
    """States on the CPU. Runs the model, which nothing else may do meanwhile."""
    passes = _apart(target, texts) if texts.apart else [_together(target, texts)]
    dtype = DTYPES[texts.dtype]
    taps = [tapped.to(dtype) for tapped, _ in passes if tapped is not None]
    tapped = torch.cat(taps).cpu() if taps else None
    hidden = torch.cat([final for _, final in passes])
    if not texts.top:
        return StatesOfTexts(tapped, hidden.to(dtype).cpu())
    chunks = [top_probs(target.head(rows).float(), texts.top) for rows in hidden.split(CHUNK)]
    top = TopProbs(*(torch.cat(parts).cpu() for parts in zip(*chunks, strict=True)))
    return StatesOfTexts(tapped, None, top.ids.int(), top.logprobs, top.tail)


Pass = tuple[torch.Tensor | None, torch.Tensor]  # taps [n, w], final states [n, H]


def _together(target: Target, texts: Texts) -> Pass:
    mask = texts.mask.to(target.device)
    segments = None if texts.segments is None else texts.padded(texts.segments, -1)
    taps, final = target.states(
        texts.padded(texts.ids, 0).to(target.device),
        mask.long(),
        texts.taps,
        None if segments is None else segments.to(target.device),
    )
    return None if taps is None else taps[mask], final[mask]


def _apart(target: Target, texts: Texts) -> list[Pass]:
    passes = []
    for ids in texts.ids.split(texts.lengths.tolist()):
        one = ids[None].to(target.device)
        taps, final = target.states(one, torch.ones_like(one), texts.taps)
        passes.append((None if taps is None else taps[0], final[0]))
    return passes
