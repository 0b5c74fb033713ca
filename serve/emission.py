"""What a round gave its requests, made text and told to whoever waits: work that an accelerator need not wait for."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from draftsmith.serve.outcome import Outcome, late_text
from draftsmith.serve.recorder import Recorder
from draftsmith.serve.request import FinishReason, Request, TokenLogprob, Update


class _Share(NamedTuple):
    request: Request
    outcome: Outcome
    logprobs: list[TokenLogprob]


class Emission:
    """Nothing that is added here can change a schedule, so it may be flushed while the next pass runs."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._pending: deque[_Share] = deque()

    def add(self, request: Request, outcome: Outcome, logprobs: list[TokenLogprob]) -> None:
        self._pending.append(_Share(request, outcome, logprobs))

    def flush(self) -> None:
        while self._pending:
            request, outcome, logprobs = self._pending.popleft()
            try:
                text = outcome.text + late_text(request, outcome)
            except Exception:
                # Whoever still runs is ended by the caller; one that is done would never be heard of again.
                if outcome.finish_reason is not None and request.on_update is not None:
                    request.on_update(request, Update([], "", [], FinishReason.ERROR))
                raise
            request.text += text
            request.logprobs += logprobs
            if outcome.finish_reason is not None and self._recorder.wants(request):
                self._recorder.finish(request)
            if request.on_update is not None:
                request.on_update(request, Update(outcome.committed, text, logprobs, outcome.finish_reason))
