"""Sampling of a request, as records have it."""

from __future__ import annotations

from typing import Any, NamedTuple

from draftsmith.fleet.observe.config import DefaultSampling
from draftsmith.fleet.observe.endpoints import Body

# Fields that leave the distribution of the answer's tokens as temperature and filters make it.
NEUTRAL = frozenset(
    {
        "model", "prompt", "messages", "temperature", "top_k", "top_p", "min_p", "max_tokens",
        "max_completion_tokens", "stop", "stop_token_ids", "seed", "n", "best_of", "stream",
        "stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "user", "echo",
        "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "return_token_ids", "return_tokens_as_token_ids",
        "return_prompt_text", "request_id", "priority", "cache_salt", "add_special_tokens",
        "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools",
        "parallel_tool_calls", "store", "metadata", "truncate_prompt_tokens", "speculation",
        "request_class", "vllm_xargs", "include_reasoning", "service_tier", "cache_prompt",
    }
)  # fmt: skip
# Values of other fields that are as good as none.
OFF: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
}


class ObservedSampling(NamedTuple):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seeded: bool  # the draws can be repeated by another request
    adjusts: bool  # more than these fields shape the distribution


def sampling_of(request: Body, defaults: DefaultSampling) -> ObservedSampling:
    """Raises `TypeError` or `ValueError` on a value of another kind."""

    def value(name: str) -> float:
        given = request.get(name)
        return float(getattr(defaults, name) if given is None else given)

    temperature = value("temperature")
    unlike = {
        name
        for name, given in request.items()
        if given is not None and name not in NEUTRAL and given not in OFF.get(name, ())
    }
    return ObservedSampling(
        temperature=temperature,
        top_k=max(0, int(value("top_k"))),
        top_p=value("top_p"),
        min_p=value("min_p"),
        seeded=temperature > 0 and request.get("seed") is not None,
        adjusts=bool(unlike),
    )
