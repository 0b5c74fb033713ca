"""k of a running request, changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.requests.request import Drafting, RequestOptions
from draftsmith.serve.sampling.params import SamplingParams

PROMPTS = [[5 + i, 60, 7, 200, 9, 33] for i in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
CONFIG = EngineConfig(k=3, compile="off")


def test_k_of_a_running_answer_changes(
    target: Target, fixed_drafter: Callable, greedy_text: Callable
) -> None:
    engine = build_engine(target, fixed_drafter(), CONFIG)
    request = engine.submit(PROMPTS[0], GREEDY, options=RequestOptions(answer="cmpl-1", tenant="t"))
    other = engine.submit(PROMPTS[1], GREEDY, options=RequestOptions(answer="cmpl-11", tenant="t"))
    assert (
        engine.scheduler.requests_of("cmpl-1", "t") == [request]
        and engine.scheduler.requests_of("cmpl-1") == []
    )
    assert engine.scheduler.requests_of("cmpl-11", "t") == [other]
    engine.step()
    engine.set_k(request, 2)
    assert request.drafting is Drafting.ON
    engine.step()
    assert request.speculation.offered[-1] == 2
    engine.set_k(request, 0)
    assert request.drafting is Drafting.OFF
    while engine.busy:
        engine.step()
    assert (
        request.output == greedy_text(PROMPTS[0], 70)
        and engine.scheduler.requests_of("cmpl-1", "t") == []
    )


def test_k_that_a_request_cannot_have(target: Target, fixed_drafter: Callable) -> None:
    engine = build_engine(target, fixed_drafter(), CONFIG)
    request = engine.submit(PROMPTS[0], GREEDY)
    with pytest.raises(UserError, match="at most 64"):
        engine.set_k(request, 65)
    engine.set_k(request, 64)
