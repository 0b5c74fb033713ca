"""What a round gave its requests, made text and told to whoever waits: work that an accelerator need not wait for."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

from draftsmith.serve.engine.output import Outcome, late_text
from draftsmith.serve.engine.recorder import Recorder
from draftsmith.serve.requests.request import FinishReason, Request, TokenLogprob, Update
from draftsmith.serve.sampling.request_errors import LoneFailures, is_own

log = logging.getLogger(__name__)


class _Share(NamedTuple):
    request: Request
    outcome: Outcome
    logprobs: list[TokenLogprob]


class Failure(NamedTuple):
    request: Request
    error: Exception


class Emission:
    """Nothing that is added here can change a schedule, so it may be flushed while the next pass runs."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._pending: deque[_Share] = deque()
        self._failed: dict[str, Failure] = {}  # by request id
        self.failures = LoneFailures()

    def add(self, request: Request, outcome: Outcome, logprobs: list[TokenLogprob]) -> None:
        self._pending.append(_Share(request, outcome, logprobs))

    def take_failed(self) -> list[Failure]:
        """Requests whose text or last record could not be made: told nothing since, to be ended by the caller."""
        failed = list(self._failed.values())
        # Later shares of theirs would be given after a hole, or after their end.
        self._pending = deque(share for share in self._pending if share.request.id not in self._failed)
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
                request.on_update(request, Update(outcome.committed, text, logprobs, outcome.finish_reason))

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
                # Whoever still runs is ended by the caller; one that is done would never be heard of again.
                if outcome.finish_reason is not None and request.on_update is not None:
                    request.on_update(request, Update([], "", [], FinishReason.ERROR))
                raise
            if outcome.finish_reason is not FinishReason.ERROR:
                self._failed[request.id] = Failure(request, error)
                return None
            log.warning("request %s, which ends with an error, could not be put away whole (%s)", request.id, error)
        return text
