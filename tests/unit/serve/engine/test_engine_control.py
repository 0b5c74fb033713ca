"""The control of k inside a real engine."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from draftsmith.config import build
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig, ServeConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.sampling.params import SamplingParams
from tests.stand_in_drafts import Offering

PROMPTS = [[5 + i, 60, 7, 200, 9, 33] for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def run(engine: EngineCore, params: SamplingParams = GREEDY) -> tuple[list[list[int]], list[int]]:
    """Outputs, and the drafts planned in each round."""
    planned = []
    requests = [engine.submit(prompt, params) for prompt in PROMPTS]
    choose = engine.scheduler.control.choose

    def watched(wishes, num_tokens):
        plan = choose(wishes, num_tokens)
        planned.append(max(plan.ks))
        return plan

    engine.scheduler.control.choose = watched
    while engine.busy:
        engine.step()
    engine.scheduler.control.choose = choose
    return [request.output for request in requests], planned


class Slow(Offering):
    """Takes its time, and the token is wrong."""

    calls = 0

    def propose(self, inputs: DraftInputs) -> Proposal:
        self.calls += 1
        time.sleep(0.02)
        return super().propose(inputs)


def test_a_draft_that_never_pays_is_left(
    target: Target, greedy_text: Callable[[list[int], int], list[int]]
) -> None:
    drafter = Slow(3)
    engine = build_engine(target, drafter, EngineConfig(k=8, adaptive=True))
    for _ in range(3):
        outputs, planned = run(engine)
    assert outputs == [greedy_text(prompt, 60) for prompt in PROMPTS]
    assert planned.count(0) >= 0.9 * len(planned)
    assert engine.stats.rounds_by_k[0] > 0.75 * engine.stats.num_rounds
    # k = 0 runs no drafter code.
    assert drafter.calls < 0.25 * engine.stats.num_rounds


def test_an_untrained_head_drafts_again_after_rounds_without_it(
    target: Target, greedy_text: Callable
) -> None:
    """k goes up and down by a schedule of the batch as requests end; what was not drafted is read
    later."""
    drafter = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    engine = build_engine(target, drafter, EngineConfig(k=5, k_schedule="1:5,2:2,3:0"))
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (40, 30, 10, 12)
    ]
    requests = [engine.submit(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    while engine.busy:
        engine.step()
    assert [request.output for request in requests] == [
        greedy_text(prompt, each.max_tokens) for prompt, each in zip(PROMPTS, params, strict=True)
    ]
    assert set(requests[0].speculation.offered) >= {5, 2} and requests[2].speculation.offered == []
    assert not engine.stats.fallbacks


def test_a_requests_own_k_is_a_cap_of_the_controls_choice(
    target: Target, fixed_drafter: Callable
) -> None:
    engine = build_engine(target, fixed_drafter(), EngineConfig(k=8, adaptive=True))
    requests = [
        engine.submit(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True, k=k))
        for k in (0, 1, None)
    ]
    while engine.busy:
        engine.step()
    assert requests[0].speculation.offered == [] and max(requests[1].speculation.offered) == 1
    assert 1 < max(requests[2].speculation.offered) <= 8


@pytest.mark.parametrize(
    "given, k, adaptive", [({}, 4, False), ({"k": "7"}, 7, False), ({"k": "auto"}, 8, True)]
)
def test_k_on_the_command_line(given: dict[str, str], k: int, adaptive: bool) -> None:
    config = build(ServeConfig, {"target": "t"} | given).engine_config()
    assert (config.k, config.adaptive) == (k, adaptive)


def test_a_schedule_on_the_command_line_says_the_most_too() -> None:
    config = ServeConfig(target="t", k_schedule="1:5,8:3,32:0").engine_config()
    assert config.k == 5 and config.k_schedule == "1:5,8:3,32:0"


@pytest.mark.parametrize("k", ["many", "-1", "1.5", ""])
def test_a_k_that_is_no_number_is_refused(k: str) -> None:
    with pytest.raises(UserError, match="auto"):
        ServeConfig(target="t", k=k).engine_config()


def test_k_auto_grows_whole_trees_or_none(target: Target) -> None:
    drafter = Eagle3.create(Eagle3Options(), target, seed=0).eval()
    engine = build_engine(
        target,
        drafter,
        EngineConfig(k=8, adaptive=True, tree="dynamic:nodes=6,depth=3,width=2", compile="off"),
    )
    answers = engine.generate(
        PROMPTS, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    )
    assert [answer.tokens for answer in answers] == target.answer(
        PROMPTS, max_new_tokens=60, ignore_eos=True
    )
    # Fewer where an answer ends; a draft of random weights pays nowhere, so most rounds have none.
    assert engine.stats.rounds_by_k[0] > engine.stats.rounds_by_k[6] > 0
