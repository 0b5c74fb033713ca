"""Requests of an SGLang scheduler that are recorded, and their properties as records need them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from draftsmith.fleet.request_options import request_options
from draftsmith.fleet.wire.messages import RequestMeta

# Sampling parameters that change a distribution beside temperature, top-k and top-p, with the value
# that does not. Verification leaves min-p out.
ADJUSTING = {
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "watermark": None,
}
WHOLE_VOCABULARY = 1 << 30  # as SGLang writes "no top-k"


@dataclass
class Tracked:
    """A request that is recorded."""

    handle: int
    request: Any
    temperature: float
    length: int  # tokens that the writer has


def is_recordable(req: Any) -> bool:
    """False for embeddings in place of tokens, images, an adapter (another target) and beams."""
    return bool(
        req.origin_input_ids
        and getattr(req, "input_embeds", None) is None
        and getattr(req, "multimodal_inputs", None) is None
        and getattr(req, "lora_id", None) is None
        and (getattr(req.sampling_params, "beam_width", None) or 1) == 1
    )


def extra_of(req: Any) -> SimpleNamespace:
    """Free arguments of a request, by vLLM's name of them."""
    return SimpleNamespace(extra_args=getattr(req.sampling_params, "custom_params", None))


def meta_of(req: Any, share: float) -> RequestMeta:
    params = req.sampling_params
    # SGLang writes greedy sampling as top-k 1 at temperature 1.
    greedy = params.top_k == 1 or params.temperature == 0
    temperature = 0.0 if greedy else float(params.temperature)
    adjusts = any(
        getattr(params, name, plain) not in (plain, None, "", {})
        for name, plain in ADJUSTING.items()
    )
    stops = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        stops |= set(getattr(req, "eos_token_ids", None) or ())
    most = params.max_new_tokens
    return RequestMeta(
        id=str(req.rid),
        request_class=request_options(extra_of(req).extra_args).request_class,
        share=share,
        temperature=temperature,
        top_k=0 if greedy or not 0 < params.top_k < WHOLE_VOCABULARY else int(params.top_k),
        top_p=1.0 if greedy else float(params.top_p),
        min_p=0.0,
        seeded=params.sampling_seed is not None and temperature > 0,
        adjusts=adjusts,
        max_tokens=WHOLE_VOCABULARY if most is None else int(most),
        stops=sorted(int(token) for token in stops),
    )
