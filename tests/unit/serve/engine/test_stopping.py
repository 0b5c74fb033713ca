"""Drafting of a request that its own acceptance stops, inside a real engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine, stopping_of
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.http.speculation_report import speculation_report
from draftsmith.serve.requests.request import Drafting, Request, RequestOptions
from draftsmith.serve.sampling.params import SamplingParams

PROMPTS = [[5 + i, 60, 7, 200, 9, 33] for i in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
CONFIG = EngineConfig(k=3, stop_below=0.5, compile="off")


def serve(engine: EngineCore, *params: SamplingParams) -> list[Request]:
    requests = [
        engine.submit(prompt, each, options=RequestOptions(answer=f"a{index}"))
        for index, (prompt, each) in enumerate(zip(PROMPTS, params))
    ]
    while engine.busy:
        engine.step()
    return requests


def gaps(request: Request) -> list[int]:
    """Passes without drafts between two rounds that drafted."""
    counts = request.speculation
    ends = [begin + size for begin, size in zip(counts.begins, counts.committed)]
    return [begin - end for begin, end in zip(counts.begins[1:], ends) if begin > end]


@pytest.mark.parametrize(
    "options", [{}, {"adaptive": True}, {"tree": "dynamic:nodes=4,depth=2,width=2"}]
)
def test_greedy_text_stays_and_its_drafting_stops(
    options: dict, target: Target, greedy_text: Callable
) -> None:
    drafter = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    engine = build_engine(target, drafter, replace(CONFIG, **options))
    requests = serve(engine, GREEDY, replace(GREEDY, k=0))
    assert [one.output for one in requests] == [greedy_text(prompt, 70) for prompt in PROMPTS[:2]]
    stopped, off = requests
    if "adaptive" in options:
        return  # which may not draft at all
    assert stopped.stopping.num_stops == 1 == engine.stats.num_drafting_stops
    assert gaps(stopped)[0] == 16 and stopped.stopping.num_stopped_passes >= 40
    assert stopped.drafting is Drafting.STOPPED and off.drafting is Drafting.OFF
    assert not engine.stats.fallbacks
    report = speculation_report(stopped.speculation, 3, level="summary", stopping=stopped.stopping)
    assert report["num_drafting_stops"] == 1
    assert report["num_stopped_passes"] == stopped.stopping.num_stopped_passes


def test_seeded_answers_repeat_because_they_are_not_stopped(
    target: Target, fixed_drafter: Callable
) -> None:
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=70, ignore_eos=True)
    found = {}
    for below in (0.0, 0.9):
        engine = build_engine(target, fixed_drafter(), replace(CONFIG, stop_below=below))
        found[below] = serve(engine, seeded, replace(seeded, seed=None))
    with_seed = [requests[0] for requests in found.values()]
    assert with_seed[0].output == with_seed[1].output
    assert all(one.stopping is None and not gaps(one) for one in with_seed)
    assert found[0.9][1].stopping.num_stops > 0, "the same request without a seed is stopped"


def test_k_of_a_running_answer_restarts_its_drafting(
    target: Target, fixed_drafter: Callable, greedy_text: Callable
) -> None:
    engine = build_engine(target, fixed_drafter(), replace(CONFIG, stop_below=3.0))
    request = engine.submit(PROMPTS[0], GREEDY, options=RequestOptions(answer="cmpl-1", tenant="t"))
    other = engine.submit(PROMPTS[1], GREEDY, options=RequestOptions(answer="cmpl-11", tenant="t"))
    assert (
        engine.scheduler.requests_of("cmpl-1", "t") == [request]
        and engine.scheduler.requests_of("cmpl-1") == []
    )
    assert engine.scheduler.requests_of("cmpl-11", "t") == [other]
    while not request.stopping.stopped:
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
    engine = build_engine(target, fixed_drafter(), replace(CONFIG, verification="typical"))
    exact, other = (engine.submit(PROMPTS[0], replace(GREEDY, k=k)) for k in (0, None))
    for request, k, words in ((exact, 2, "labelled lossless"), (other, 65, "at most 64")):
        with pytest.raises(UserError, match=words):
            engine.set_k(request, k)
    engine.set_k(exact, 0)
    engine.set_k(other, 64)


def test_a_trial_comes_before_unread_states_are_dropped() -> None:
    assert stopping_of(CONFIG, 64).longest == 48 and stopping_of(CONFIG, 1024).longest == 256
    assert stopping_of(replace(CONFIG, stop_below=0.0), 64) is None
