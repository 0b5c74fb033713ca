"""What of a round's tokens a request keeps: end-of-sequence, stop tokens, length and stop strings."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from draftsmith.serve.requests.request import FinishReason, Request


class Outcome(NamedTuple):
    committed: list[int]
    finish_reason: FinishReason | None
    text: str = ""  # of what a stop string was looked for in
    unspoken: int = 0  # of the committed tokens, how many `late_text` is to make text of


def outcome(request: Request, emitted: list[int], eos_token_ids: Collection[int]) -> Outcome:
    """What is kept of `emitted`. A last token of -1, where none could be decided, ends the request with an error unless the
    tokens before it end it first.

    Changes nothing of the request but its text stream, and that only where a stop string may end the answer.
    """
    failed = emitted[-1] < 0
    committed, reason, silent = _trim(request, emitted[:-1] if failed else emitted, eos_token_ids)
    if failed and reason is None:
        reason = FinishReason.ERROR
    stream, count = request.text_stream, len(committed) - silent
    if stream is None:
        return Outcome(committed, reason)
    if not stream.stop:
        return Outcome(committed, reason, unspoken=count)
    step = stream.push(committed[:count])
    if step.stopped:
        return Outcome(committed[: step.num_tokens], FinishReason.STOP, step.text)
    return Outcome(committed, reason, step.text)


def late_text(request: Request, given: Outcome) -> str:
    """The text that nothing depended on, to be made once for each outcome and in their order."""
    stream = request.text_stream
    if stream is None or not given.committed:
        return ""
    text = stream.push(given.committed[: given.unspoken]).text if given.unspoken else ""
    return text + stream.finish() if given.finish_reason is not None else text


def complaint(request: Request, *, sound: bool) -> str:
    """What to tell of a request that ended because a position had no token; `sound`: the target's logits there were no NaN.

    "" where the request is not to blame.
    """
    state = request.law_state
    if state is not None and (error := state.error or state.error_behind_drafts):
        return error
    if sound and request.params.adjusts:
        return (
            f"what the request allows leaves no token at position {request.num_tokens} "
            "(of allowed_token_ids, logit_bias, bad_words, min_tokens and its format); loosen one of them"
        )
    return ""


class _Trimmed(NamedTuple):
    committed: list[int]
    reason: FinishReason | None
    silent: int  # how many tokens at the end (an end-of-sequence token) have no text


def _trim(request: Request, emitted: list[int], eos_token_ids: Collection[int]) -> _Trimmed:
    params = request.params
    eos = () if params.ignore_eos else eos_token_ids
    for count, token in enumerate(emitted[: request.remaining], 1):
        if token in eos:
            return _Trimmed(emitted[:count], FinishReason.STOP, 1)
        if token in params.stop_token_ids:
            return _Trimmed(emitted[:count], FinishReason.STOP, 0)
    if not eos and (ended := _grammar_end(request, emitted[: request.remaining])) is not None:
        return _Trimmed(emitted[:ended], FinishReason.STOP, 0)
    if len(emitted) >= request.remaining:
        return _Trimmed(emitted[: request.remaining], FinishReason.LENGTH, 0)
    return _Trimmed(emitted, None, 0)


def _grammar_end(request: Request, emitted: list[int]) -> int | None:
    """How many tokens complete a text that a grammar lets nothing follow; asked where no token says so."""
    if request.law_state is None or request.law_state.matcher is None:
        return None
    return request.law_state.matcher.tokens_until_end(emitted)
