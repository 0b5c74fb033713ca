"""Rounds at rest in the engine: their states are kept, so that drafts can follow them."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import pytest
import torch

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import Control, RoundPlan, RoundResult, RowBudget
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests.request import Request, TapLog
from draftsmith.serve.sampling.params import SamplingParams
from tests.round_calls import calls

PROMPTS = [[2, 3, 5, 7, 11], [13, 17, 19], [23, 29, 31, 37, 41, 43]]


class Resting(Control):
    """At rest but for rounds `drafts_at`, which draft 2 tokens."""

    learns = True

    def __init__(self, drafts_at: range):
        self.drafts_at, self.round, self.asked, self.observed = drafts_at, 0, 0, 0

    def rests(self, classes: Set[str], num_rows: int, num_tokens: int) -> bool:
        self.round += 1
        return self.round not in self.drafts_at

    def choose(self, budgets: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        self.asked += 1
        return RoundPlan([min(2, budget.most) for budget in budgets])

    def observe(self, result: RoundResult) -> None:
        self.observed += result.plan is not None


@pytest.mark.parametrize(("compile", "prefix_cache"), [("auto", True), ("off", False)])
def test_a_draft_after_rest_reads_the_targets_states(
    compile: str,
    prefix_cache: bool,
    target: Target,
    head: Eagle3,
    greedy_text: Callable[[list[int], int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(k=2, compile=compile, prefix_cache=prefix_cache, block_size=4)  # type: ignore[arg-type]
    engine = build_engine(target, head, config)
    control = engine.scheduler.control = Resting(range(20, 24))
    read: list[DraftInputs] = []
    propose = head.propose

    def noted(inputs: DraftInputs) -> Proposal:
        read.append(inputs)
        return propose(inputs)

    monkeypatch.setattr(head, "propose", noted)
    requests = [
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))
        for prompt, n in zip(PROMPTS, (40, 50, 12), strict=True)
    ]
    while engine.busy:
        engine.step()
    assert control.asked == control.observed == len(read) == 4, "rest is neither chosen nor learnt"
    assert [request.output for request in requests] == [
        greedy_text(request.tokens[: request.num_prompt], request.num_output)
        for request in requests
    ]
    assert not engine.stats.fallbacks
    for inputs in read:
        assert inputs.taps is not None
        # The newest token of each row has yet to go through the target.
        pieces = inputs.taps.split((inputs.lengths - 1).tolist())
        for start, taps, text in zip(inputs.starts.tolist(), pieces, inputs.histories, strict=True):
            ids = torch.tensor([text[: start + len(taps)]])
            own = target.states(ids, torch.ones_like(ids), head.taps)[0]
            assert own is not None
            torch.testing.assert_close(taps, own[0, start:], rtol=1e-3, atol=1e-4)


def resting_engine(target: Target, head: Eagle3, *, compile: str) -> EngineCore:
    config = EngineConfig(k=2, compile=compile, prefix_cache=False)  # type: ignore[arg-type]
    engine = build_engine(target, head, config)
    engine.scheduler.control = Resting(range(0))
    return engine


def submitted(engine: EngineCore, *, max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return engine.submit(PROMPTS[0], params)


@pytest.mark.parametrize("logged", [2, 64])
@pytest.mark.parametrize("compile", ["auto", "off"])
def test_states_that_no_draft_reads_are_not_kept(
    compile: str, logged: int, target: Target, head: Eagle3
) -> None:
    engine = resting_engine(target, head, compile=compile)
    engine.committer.most_kept = 4
    request = submitted(engine, max_tokens=20)
    request.recording.tap_log = TapLog(logged)
    while request.num_output < 10:
        engine.step()
    assert request.draft.lost_taps
    assert engine.committer._shared is None
    assert request.recording.tap_log.end == min(logged, request.cache.computed)


@pytest.mark.parametrize("streams", [1, 8])
def test_a_round_at_rest_calls_few_functions_more_than_one_without_a_draft(
    streams: int, target: Target, head: Eagle3
) -> None:
    """Nor more of them where it has more rows."""
    plain = build_engine(target, None, EngineConfig())
    resting = build_engine(target, head, EngineConfig(k=3, adaptive=True))
    resting.scheduler.control = Resting(range(0))
    prompts = [[2 + row, 3, 5] for row in range(streams)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    assert calls(resting, prompts, params) <= calls(plain, prompts, params) + 10
