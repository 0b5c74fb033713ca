"""The control of k inside a real engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from draftsmith.config import build
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig, ServeConfig
from draftsmith.serve.control.control import Control, RoundPlan, RowBudget
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.sampling.params import SamplingParams
from tests.stand_in_drafts import Offering

PROMPTS = [[5 + i, 60, 7, 200, 9, 33] for i in range(4)]
TEXT = PROMPTS[0]
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


class ByRows(Control):
    """k by the number of rows: that of one row, of two, and so on; the last is of more too."""

    def __init__(self, *ks: int):
        self.ks, self.new_texts = ks, 0

    def new_text(self) -> None:
        self.new_texts += 1

    def choose(self, budgets: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        k = self.ks[min(len(budgets), len(self.ks)) - 1]
        return RoundPlan([min(k, budget.most) for budget in budgets])


def by_rows(
    target: Target, drafter: ServingDrafter, *ks: int, compile: str = "off", **options: Any
) -> EngineCore:
    engine = build_engine(target, drafter, EngineConfig(k=max(3, *ks), compile=compile, **options))
    engine.scheduler.control = ByRows(*ks)
    return engine


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
    target: Target, head: Eagle3, greedy_text: Callable
) -> None:
    """k goes up and down with the batch as requests end; what was not drafted is read later."""
    engine = by_rows(target, head, 5, 2, 0, compile="auto")
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (40, 30, 10, 12)
    ]
    requests = [engine.submit(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    while engine.busy:
        engine.step()
    assert [request.output for request in requests] == [
        greedy_text(prompt, each.max_tokens) for prompt, each in zip(PROMPTS, params, strict=True)
    ]
    assert engine.scheduler.control.new_texts == len(requests)
    assert set(requests[0].speculation.offered) >= {5, 2} and requests[2].speculation.offered == []
    assert not engine.stats.fallbacks


@pytest.mark.parametrize(
    "given, k, adaptive", [({}, 4, False), ({"k": "7"}, 7, False), ({"k": "auto"}, 8, True)]
)
def test_k_on_the_command_line(given: dict[str, str], k: int, adaptive: bool) -> None:
    config = build(ServeConfig, {"target": "t"} | given).engine_config()
    assert (config.k, config.adaptive) == (k, adaptive)


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


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_text_nobody_drafted_for_long_is_read_again_when_drafts_are_wanted(
    prefix_cache: bool, target: Target, head: Eagle3, greedy_text: Callable
) -> None:
    engine = by_rows(target, head, 3, 3, 0, prefix_cache=prefix_cache)
    engine.committer.most_kept = 10
    prompts = [TEXT, TEXT[1:], TEXT[2:]]
    first, second, _ = (
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))
        for prompt, n in zip(prompts, (60, 60, 20), strict=True)
    )
    readings = set()
    while engine.busy:
        engine.step()
        readings.add(first.num_preemptions + second.num_preemptions)
    for request in (first, second):
        assert (
            request.k == 3
            and request.num_preemptions == 1
            and sum(request.speculation.offered) > 30
        )
    assert readings == {0, 1, 2}, "one at a time"
    assert [request.output for request in (first, second)] == [
        greedy_text(prompt, 60) for prompt in prompts[:2]
    ]
    assert not engine.stats.fallbacks
