"""Events of an HTTP request's engine requests: of every round for a stream, of their ends for an
answer in one piece."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from draftsmith.serve.http.limits import Arrival
from draftsmith.serve.http.server import Intake, ThreadBridge
from draftsmith.serve.http.streams import RequestStreams
from draftsmith.serve.requests.request import FinishReason, RequestOptions, Update
from draftsmith.serve.sampling.params import SamplingParams


def request_of(prompt, params, on_update, options) -> SimpleNamespace:
    return SimpleNamespace(on_update=on_update, finished=True)


def enqueue(requests) -> None:
    """Gives each request three updates, of which the last one ends it."""
    for request in requests:
        for reason in (None, None, FinishReason.LENGTH):
            request.on_update(request, Update([1], "x", [], reason))


@pytest.mark.parametrize(("every_round", "count"), [(True, 3), (False, 1)])
def test_an_answer_in_one_piece_has_events_of_its_ends_alone(every_round, count) -> None:
    loop = SimpleNamespace(
        engine=SimpleNamespace(
            inputs=SimpleNamespace(request=request_of, waits_for_grammar=lambda params: False)
        ),
        enqueue=enqueue,
    )

    async def events() -> list:
        streams = RequestStreams(
            loop,
            Intake(None),
            ThreadBridge(),
            Arrival(time.monotonic(), 10.0),
            every_round=every_round,
        )
        await streams.submit([[1], [2]], [SamplingParams()] * 2, RequestOptions())
        return [event async for found in streams.rounds() for event in found]

    found = asyncio.run(events())
    assert [event.index for event in found] == [0] * count + [1] * count
    assert [event.update.finish_reason for event in found][count - 1 :: count] == [
        FinishReason.LENGTH
    ] * 2
