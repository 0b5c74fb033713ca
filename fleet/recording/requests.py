"""Requests of a vLLM worker that are recorded, and their properties as records need them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from draftsmith.fleet.engine import request_options
from draftsmith.fleet.wire.messages import RequestMeta

# Below it vLLM samples greedily.
GREEDY = 1e-5
# Sampling parameters beside temperature, top-k, top-p and min-p that change a distribution, with
# the value that does not.
ADJUSTING = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
}


@dataclass(frozen=True)
class Tracked:
    """A request that is recorded."""

    handle: int
    temperature: float


def adjusts(params: Any, kind: str) -> bool:
    """True where a request is sampled from another distribution than its four numbers describe. The
    first runner's verification leaves min-p out."""
    changed = any(
        getattr(params, name, plain) not in (plain, None, [], {})
        for name, plain in ADJUSTING.items()
    )
    return changed or (kind == "first" and params.min_p > GREEDY)


def is_recordable(new: Any) -> bool:
    """False for what a record cannot hold: pooling, embeddings in place of tokens, images, an
    adapter (another target), and answers that end by their own repetitions."""
    return bool(
        new.prompt_token_ids is not None
        and new.sampling_params is not None
        and getattr(new, "prompt_embeds", None) is None
        and not getattr(new, "mm_features", None)
        and getattr(new, "lora_request", None) is None
        and getattr(new.sampling_params, "repetition_detection", None) is None
    )


def share_of(params: Any, most: float, room: float) -> float:
    """Chance with which a request is recorded: its own, else the engine's `most`, as much lower as
    the writer has lowered that (`room`)."""
    options = request_options(getattr(params, "extra_args", None))
    if not options.record:
        return 0.0
    lowered = min(1.0, room / most) if most > 0 else 0.0
    return (most if options.share is None else options.share) * lowered


def meta_of(new: Any, share: float, kind: str, max_length: int) -> RequestMeta:
    """Properties of a new request, as the scheduler sends it to its workers."""
    params = new.sampling_params
    temperature = 0.0 if params.temperature < GREEDY else float(params.temperature)
    eos = getattr(params, "eos_token_id", None)
    return RequestMeta(
        id=new.req_id,
        request_class=request_options(params.extra_args).request_class,
        share=share,
        temperature=temperature,
        top_k=max(0, params.top_k),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        seeded=params.seed is not None and temperature > 0,
        adjusts=adjusts(params, kind),
        max_tokens=max_length if params.max_tokens is None else params.max_tokens,
        stops=[*([] if eos is None else [eos]), *(params.stop_token_ids or ())],
    )


class Chooser:
    """Choice of the requests that are recorded, each whole. Draws of its own: the engine's random
    numbers stay as they are."""

    def __init__(self, most: float, seed: int | None = None):
        self.most, self._draws = most, random.Random(seed)

    def share(self, params: Any, room: float) -> float:
        """Share with which a request is recorded, where it is; else 0."""
        share = share_of(params, self.most, room)
        return share if self._draws.random() < share else 0.0
