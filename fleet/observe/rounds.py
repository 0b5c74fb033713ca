"""Round records of an observed answer, with the tokens and the sampling of its request.

Tokens are the server's own ids, else those of the target's tokenizer where it is sure to give the
same. Ids are known of accepted tokens alone: the others of a round are `UNLOGGED`, and q is never
there; p has no values, which the learner computes. Where an answer's rounds are not known, each of
its tokens is a record without drafts: text to learn from, and to score at the first depth.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from draftsmith.chat_answers import ChatAnswers
from draftsmith.fleet.config import DefaultSampling
from draftsmith.fleet.observe.endpoints import Body, Completions, ObservedAnswer
from draftsmith.record import UNLOGGED, Distributions, RecordHead, RoundRecord, RoundRow

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
# Fields by which a server makes another prompt.
OTHER_PROMPT = ("documents", "chat_template", "functions")


class ObservedStep(NamedTuple):
    """A target pass over drafted tokens."""

    begin: int  # tokens of the answer before it
    drafted: int
    accepted: int
    committed: int


def steps_of(report: Mapping[str, Any], length: int) -> list[ObservedStep] | None:
    """Drafting steps of an answer of `length` tokens; None where the report does not say where
    each one begins.

    `draftsmith serve` gives their places. vLLM does not: its first token comes from the prompt's
    pass and every further step begins where the one before ends, so that the sum of all must be
    the answer, whose last step alone may be cut. A step without drafts in between makes the sum
    fall short.
    """
    drafted, accepted = report.get("per_step_drafted"), report.get("per_step_accepted")
    if not drafted or not accepted or len(drafted) != len(accepted):
        return None
    begins, committed = report.get("per_step_begin"), report.get("per_step_committed")
    if begins is None or committed is None:
        found = _in_a_row(drafted, accepted, length)
    else:
        found = [ObservedStep(*values) for values in zip(begins, drafted, accepted, committed)]
    ends = [step.begin + step.committed for step in found]
    is_whole = bool(ends) and ends[-1] <= length
    fits = all(end <= step.begin for end, step in zip(ends, found[1:]))
    sound = all(
        0 <= step.accepted <= step.drafted and 0 < step.committed <= step.accepted + 1
        for step in found
    )
    return found if is_whole and fits and sound else None


def _in_a_row(drafted: Sequence[int], accepted: Sequence[int], length: int) -> list[ObservedStep]:
    """Empty where the steps do not add up to `length`."""
    steps, begin = [], 1
    for offered, kept in zip(drafted, accepted):
        steps.append(ObservedStep(begin, offered, kept, min(kept + 1, length - begin)))
        begin += kept + 1
    return steps if begin >= length and steps[-1].committed > 0 else []


def records_of(
    tokens: TokenCounter,
    steps: Sequence[ObservedStep] | None,
    head: RecordHead,
    *,
    adjusts: bool = False,
) -> list[RoundRecord]:
    """Records of an answer; `adjusts` as of `ObservedSampling`."""
    text, offset = [*tokens.prompt, *tokens.answer], len(tokens.prompt)
    if steps is None:
        steps = [ObservedStep(at, 0, 0, 1) for at in range(len(tokens.answer))]
    else:
        steps = [step for step in steps if step.drafted]
    undrafted = replace(head, draft_version="", sampler="")
    records: list[RoundRecord] = []
    recorded = 0
    for step in steps:
        position = offset + step.begin
        context = text[recorded:position]
        recorded = position + step.committed
        committed = text[position:recorded]
        kept = committed[: step.accepted]
        is_full = step.committed == step.accepted + 1
        record = RoundRow(
            head if step.drafted else undrafted,
            len(records),
            position,
            context,
            drafted=[*kept, *[UNLOGGED] * (step.drafted - len(kept))],
            accepted=step.accepted,
            committed=committed,
            emitted=committed[-1] if is_full else UNLOGGED,
        ).record(time.time())
        if not adjusts:
            # Of a fully accepted draft the last token was not drafted.
            reached = min(step.committed, step.accepted + 1, max(1, step.drafted))
            record.p = Distributions.unlogged(reached)
        records.append(record)
    end = RoundRow(undrafted, len(records), len(text), text[recorded:], last=True)
    return [*records, end.record(time.time())]


class TokenCounter(NamedTuple):
    prompt: list[int]
    answer: list[int]


class Unknown(Exception):
    """Tokens that cannot be known; its text is the reason that is counted."""


def tokens_of(
    endpoint: Completions, request: Body, answer: ObservedAnswer, form: ChatAnswers | None
) -> TokenCounter:
    """Raises `Unknown` where neither the server nor the tokenizer gives the tokens."""
    prompt = answer.prompt_ids or _prompt(endpoint, request, answer, form)
    given = answer.token_ids
    if given is not None and answer.completion_tokens not in (None, len(given)):
        raise Unknown("token ids that are not all")
    return TokenCounter(prompt, _answer(prompt, request, answer, form) if given is None else given)


def _prompt(
    endpoint: Completions, request: Body, answer: ObservedAnswer, form: ChatAnswers | None
) -> list[int]:
    prompt = endpoint.given_prompt(request)
    if prompt is None:
        prompt = _encoded(endpoint, request, form)
    # Servers differ in whether they show tools that may not be called.
    hidden = request.get("tool_choice") == "none" and request.get("tools")
    if answer.prompt_tokens is None and (hidden or request.get("truncate_prompt_tokens")):
        raise Unknown("prompts without a count")
    if answer.prompt_tokens not in (None, len(prompt)):
        raise Unknown("prompts of another length")
    return prompt


def _encoded(endpoint: Completions, request: Body, form: ChatAnswers | None) -> list[int]:
    if form is None:
        raise Unknown("no token ids")
    if any(request.get(name) for name in OTHER_PROMPT):
        raise Unknown("prompts that the server makes otherwise")
    try:
        prompt = endpoint.prompt(request, form.tokenizer)
    except Exception as error:
        # Chat templates are programs and may raise any exception.
        raise Unknown("prompts without a template") from error
    if prompt is None:
        raise Unknown("several prompts")
    return prompt


def _answer(
    prompt: list[int], request: Body, answer: ObservedAnswer, form: ChatAnswers | None
) -> list[int]:
    """Tokens of the text. Any text has several tokenisations: the canonical one is taken where it
    gives back the text and has as many tokens as the server counted."""
    if form is None:
        raise Unknown("no token ids")
    if not answer.is_text_whole or request.get("echo"):
        raise Unknown("texts in parts")
    ids = form.exact(answer.text)
    if ids is None:
        raise Unknown("texts that do not round-trip")
    end = form.end_behind(prompt)
    # A stop string ends in the middle of a token, or of a text that is cut off.
    is_ended = answer.finish == "stop" and not isinstance(answer.stop_reason, str)
    if answer.completion_tokens is None:
        if is_ended and request.get("stop"):
            raise Unknown("stop strings without a count")
        return [*ids, *end] if is_ended else ids
    for found in (ids, [*ids, *end] if is_ended else ids):
        if len(found) == answer.completion_tokens:
            return found
    raise Unknown("texts of another length")


class ObservedSampling(NamedTuple):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seeded: bool  # the draws can be repeated by another request
    adjusts: bool  # more than these fields shape the distribution

    @property
    def shared(self) -> dict[str, Any]:
        """Fields of `RecordHead`."""
        return {name: value for name, value in self._asdict().items() if name != "adjusts"}


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
