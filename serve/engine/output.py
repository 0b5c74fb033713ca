"""Tokens that a request keeps of a round (end-of-sequence, stop tokens, length, stop strings), with
text and logprobs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import Reading, sent
from draftsmith.serve.engine.round import prompt_positions
from draftsmith.serve.engine.scheduler import ScheduledRow
from draftsmith.serve.requests.request import FinishReason, Request, TokenLogprob
from draftsmith.serve.sampling.state import SamplingState


class StopCheck(NamedTuple):
    """Tokens committed of a round, and the reason why the request ends with them, if it does."""

    committed: list[int]
    finish_reason: FinishReason | None
    text: str = ""  # text that was searched for a stop string
    num_undecoded: int = 0  # committed tokens whose text `flush_text` is to make


def check_stop(request: Request, emitted: list[int], eos_token_ids: Collection[int]) -> StopCheck:
    """Trim `emitted` to the tokens that are kept. A last token of -1, where none could be decided,
    ends the request with an error unless the tokens before it end it first.

    Changes nothing of the request but its text stream, and that only where a stop string may end
    the answer.
    """
    failed = emitted[-1] < 0
    committed, reason, num_hidden = _trim(
        request, emitted[:-1] if failed else emitted, eos_token_ids
    )
    if failed and reason is None:
        reason = FinishReason.ERROR
    stream, count = request.text_stream, len(committed) - num_hidden
    if stream is None:
        return StopCheck(committed, reason)
    if not stream.stop:
        return StopCheck(committed, reason, num_undecoded=count)
    step = stream.push(committed[:count])
    if step.stopped:
        return StopCheck(committed[: step.num_tokens], FinishReason.STOP, step.text)
    return StopCheck(committed, reason, step.text)


def flush_text(request: Request, kept: StopCheck) -> str:
    """Text that no decision depended on; called once for each `StopCheck`, in their order."""
    stream = request.text_stream
    if stream is None or not kept.committed:
        return ""
    text = stream.push(kept.committed[: kept.num_undecoded]).text if kept.num_undecoded else ""
    return text + stream.finish() if kept.finish_reason is not None else text


def error_message(request: Request, *, logits_finite: bool) -> str:
    """Message to the client of a request that ended because a position had no token; "" where the
    request is not the cause.

    Args:
        logits_finite: the target's logits at that position held no NaN.
    """
    state = request.sampling_state
    if state is not None and (error := state.error or state.error_behind_drafts):
        return error
    if logits_finite and request.params.adjusts:
        return (
            f"what the request allows leaves no token at position {request.num_tokens} "
            "(of allowed_token_ids, logit_bias, bad_words, min_tokens and its format); loosen one "
            "of them"
        )
    return ""


def _trim(
    request: Request, emitted: list[int], eos_token_ids: Collection[int]
) -> tuple[list[int], FinishReason | None, int]:
    """(committed tokens, why they end the request, how many at the end are without text)."""
    params, remaining = request.params, request.remaining
    eos = () if params.ignore_eos else eos_token_ids
    for count, token in enumerate(emitted[:remaining], 1):
        if token in eos:
            hidden = 0 if params.include_stop_str_in_output else 1
            return emitted[:count], FinishReason.STOP, hidden
        if token in params.stop_token_ids:
            return emitted[:count], FinishReason.STOP, 0
    if not eos and request.sampling_state is not None:
        ended = _grammar_end(request.sampling_state, emitted[:remaining])
        if ended is not None:
            return emitted[:ended], FinishReason.STOP, 0
    if len(emitted) >= remaining:
        return emitted[:remaining], FinishReason.LENGTH, 0
    return emitted, None, 0


def _grammar_end(state: SamplingState, emitted: list[int]) -> int | None:
    """Number of tokens that complete a text which the grammar lets nothing follow, None if they do
    not."""
    return None if state.matcher is None else state.matcher.tokens_until_end(emitted)


Logprobs = Callable[[], list[TokenLogprob]]


def token_logprobs(
    logits: torch.Tensor, tokens: list[int], alternatives: int, *, ranked: bool = False
) -> Logprobs:
    """Logprobs of `tokens` [n] by the raw logits [n, V] of their positions, with their ranks if
    `ranked`. They come to the host while it goes on."""
    logprobs = torch.log_softmax(logits[: len(tokens)], dim=-1)
    own = logprobs.gather(1, sent(logits.device, tokens)[0][:, None])  # [n, 1]
    likeliest = torch.topk(logprobs, min(alternatives, logprobs.shape[-1]), dim=-1)
    # All of a token as numbers of one row.
    parts = [own, likeliest.values, likeliest.indices]
    if ranked:
        parts.append((logprobs > own).sum(dim=1, keepdim=True).add(1))
    told = torch.cat([part.double() for part in parts], dim=1)
    count = likeliest.indices.shape[1]
    reading = Reading(told)

    def read() -> list[TokenLogprob]:
        rows: list[list[float]] = reading.wait().tolist()
        return [
            TokenLogprob(
                token,
                row[0],
                list(zip(map(int, row[1 + count : 1 + 2 * count]), row[1 : 1 + count])),
                int(row[-1]) if ranked else 0,
            )
            for token, row in zip(tokens, rows)
        ]

    return read


def add_prompt_logprobs(row: ScheduledRow, logits: torch.Tensor) -> None:
    """Add the prompt logprobs that a pass gave; `logits` [n, V] are those after the row's
    `prompt_positions`."""
    request, positions = row.request, prompt_positions(row)
    alternatives = request.params.prompt_logprobs
    if alternatives is None or not positions:
        return
    tokens = request.tokens[positions.start + 1 : positions.stop + 1]
    request.prompt_logprobs += token_logprobs(logits, tokens, alternatives, ranked=True)()
