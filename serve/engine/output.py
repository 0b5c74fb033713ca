"""What of a round's tokens a request keeps: end-of-sequence, stop tokens, length and
stop strings."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import torch

from draftsmith.serve.engine.recorder import Recorder
from draftsmith.serve.engine.runner import prompt_positions
from draftsmith.serve.engine.scheduler import Row
from draftsmith.serve.requests.request import FinishReason, Request, TokenLogprob, Update
from draftsmith.serve.sampling.request_errors import LoneFailures, is_own


class Outcome(NamedTuple):
    committed: list[int]
    finish_reason: FinishReason | None
    text: str = ""  # of what a stop string was looked for in
    unspoken: int = 0  # of the committed tokens, how many `late_text` is to make text of


def outcome(request: Request, emitted: list[int], eos_token_ids: Collection[int]) -> Outcome:
    """What is kept of `emitted`. A last token of -1, where none could be decided, ends the request
    with an error unless the tokens before it end it first.

    Changes nothing of the request but its text stream, and that only where a stop string may end
    the answer.
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
    """What to tell of a request that ended because a position had no token; `sound`: the target's
    logits there were no NaN.

    "" where the request is not to blame.
    """
    state = request.sampling_state
    if state is not None and (error := state.error or state.error_behind_drafts):
        return error
    if sound and request.params.adjusts:
        return (
            f"what the request allows leaves no token at position {request.num_tokens} "
            "(of allowed_token_ids, logit_bias, bad_words, min_tokens and its format); loosen one "
            "of them"
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
    """How many tokens complete a text that a grammar lets nothing follow; asked where no token says
    so."""
    if request.sampling_state is None or request.sampling_state.matcher is None:
        return None
    return request.sampling_state.matcher.tokens_until_end(emitted)


log = logging.getLogger(__name__)


class _Share(NamedTuple):
    request: Request
    outcome: Outcome
    logprobs: list[TokenLogprob]


class Failure(NamedTuple):
    request: Request
    error: Exception


class Emission:
    """Nothing that is added here can change a schedule, so it may be flushed while the next pass
    runs."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._pending: deque[_Share] = deque()
        self._failed: dict[str, Failure] = {}  # by request id
        self.failures = LoneFailures()

    def add(self, request: Request, outcome: Outcome, logprobs: list[TokenLogprob]) -> None:
        self._pending.append(_Share(request, outcome, logprobs))

    def take_failed(self) -> list[Failure]:
        """Requests whose text or last record could not be made: told nothing since, to be ended by
        the caller."""
        failed = list(self._failed.values())
        # Later shares of theirs would be given after a hole, or after their end.
        self._pending = deque(
            share for share in self._pending if share.request.id not in self._failed
        )
        self._failed.clear()
        return failed

    def flush(self) -> None:
        while self._pending:
            share = self._pending.popleft()
            if share.request.id in self._failed:
                continue
            text = self._text(share)
            if text is None:
                continue
            request, outcome, logprobs = share
            if outcome.finish_reason is not FinishReason.ERROR:
                self.failures.served(ended=outcome.finish_reason is not None)
            request.text += text
            request.logprobs += logprobs
            if request.on_update is not None:
                request.on_update(
                    request, Update(outcome.committed, text, logprobs, outcome.finish_reason)
                )

    def _text(self, share: _Share) -> str | None:
        """None where it could not be made and the request is still to be ended for that."""
        request, outcome, _ = share
        text = outcome.text
        try:
            text += late_text(request, outcome)
            if outcome.finish_reason is not None and self._recorder.wants(request):
                self._recorder.finish(request)
        except Exception as error:
            if not is_own(error):
                # Whoever still runs is ended by the caller; one that is done would never be heard
                # of again.
                if outcome.finish_reason is not None and request.on_update is not None:
                    request.on_update(request, Update([], "", [], FinishReason.ERROR))
                raise
            if outcome.finish_reason is not FinishReason.ERROR:
                self._failed[request.id] = Failure(request, error)
                return None
            log.warning(
                "request %s, which ends with an error, could not be put away whole (%s)",
                request.id,
                error,
            )
        return text


def token_logprobs(
    logits: torch.Tensor, tokens: list[int], alternatives: int
) -> list[TokenLogprob]:
    """Raw logits [n, V] of the positions of `tokens` [n]."""
    logprobs = torch.log_softmax(logits[: len(tokens)], dim=-1)
    emitted = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    likeliest = torch.topk(logprobs, min(alternatives, logprobs.shape[-1]), dim=-1)
    tops = [
        list(zip(ids, values))
        for ids, values in zip(likeliest.indices.tolist(), likeliest.values.tolist())
    ]
    return [TokenLogprob(*parts) for parts in zip(tokens, emitted, tops)]


def add_prompt_logprobs(row: Row, logits: torch.Tensor) -> None:
    """What a pass tells of the row's prompt; `logits` [n, V] are those behind the row's
    `prompt_positions`."""
    request, positions = row.request, prompt_positions(row)
    alternatives = request.params.prompt_logprobs
    if alternatives is None or not positions:
        return
    tokens = request.tokens[positions.start + 1 : positions.stop + 1]
    request.prompt_logprobs += token_logprobs(logits, tokens, alternatives)
