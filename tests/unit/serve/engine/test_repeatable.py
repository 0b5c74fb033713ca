"""Requests whose draws can be repeated (sampled, with a seed of their own) leave no mark on records
and controls."""

from __future__ import annotations

import copy
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.record import RoundRecord
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import RoundResult
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests import input_processor
from draftsmith.serve.requests.request import RequestOptions
from draftsmith.serve.sampling.params import SamplingParams
from tests.stand_in_drafts import Uncached

PROMPT = [5, 60, 7, 200, 9, 33]
SAMPLED = SamplingParams(temperature=2.0, max_tokens=40, ignore_eos=True)
SEEDED = replace(SAMPLED, seed=7)
GREEDY = replace(SEEDED, temperature=0.0)
ADAPTIVE = EngineConfig(k=4, adaptive=True, compile="off", seed=1)


def plain(value: Any) -> Any:
    """Nested state as what compares by value."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [plain(item) for item in value]
    if hasattr(value, "__dict__"):
        return plain(vars(value))
    if hasattr(value, "__slots__"):
        return {name: plain(getattr(value, name)) for name in value.__slots__}
    return copy.deepcopy(value)


def by_acceptance(engine: EngineCore) -> dict[str, Any]:
    """All state of the engine that is decided by how drafts were accepted, and nothing that is
    decided by time alone."""
    return plain({
        "survival": engine.scheduler.control.survival,
        "rests": (engine.draft._failures, engine.draft._pause),
        "records": engine.recorder.num_records,
    })  # fmt: skip


def serve(engine: EngineCore, params: SamplingParams, *, learn: bool = True) -> None:
    engine.submit(PROMPT, params, options=RequestOptions(learn=learn))
    while engine.busy:
        engine.step()


@pytest.fixture
def engine(target: Target, fixed_drafter: Callable, records: list[RoundRecord]) -> EngineCore:
    return build_engine(
        target, fixed_drafter(sharpness=0.5), ADAPTIVE, sink=records, draft_version="1"
    )


def test_a_seeded_sampled_request_moves_nothing(engine: EngineCore) -> None:
    before = by_acceptance(engine)
    serve(engine, SEEDED)
    assert by_acceptance(engine) == before
    assert engine.stats.num_drafts > 0 < engine.stats.num_accepted_tokens
    assert (engine.stats.num_seeded_requests, engine.stats.num_seeded_tokens) == (1, 40)


@pytest.mark.parametrize("params", [SAMPLED, GREEDY])
def test_others_move_what_it_does_not(params: SamplingParams, engine: EngineCore) -> None:
    """The negative control, and what a greedy request with a seed counts as: it draws nothing."""
    before = by_acceptance(engine)
    serve(engine, params)
    after = by_acceptance(engine)
    assert {name for name in before if before[name] != after[name]} == {"survival", "records"}
    assert engine.stats.num_seeded_requests == engine.stats.num_seeded_tokens == 0


def test_one_among_others_is_left_out_alone(engine: EngineCore, records: list[RoundRecord]) -> None:
    seen: list[RoundResult] = []
    observe = engine.scheduler.control.observe
    engine.scheduler.control.observe = lambda result: (seen.append(result), observe(result))
    for params in (SAMPLED, SEEDED, GREEDY):
        engine.submit(PROMPT, params)
    while engine.busy:
        engine.step()
    full = [result for result in seen if len(result.offers) == 3]
    assert full and all(
        sum(offer[2:] == (None, None) for offer in result.offers) == 1
        and sum(None in offer for offer in result.offers) == 1
        for result in full
    )
    assert {record.temperature for record in records} == {0.0, 2.0}
    assert len({record.request for record in records}) == 2 and not any(
        record.seeded for record in records
    )


class Broken(Uncached):
    """Draws its first token; the second has no distribution, or there is an exception."""

    def __init__(self, vocab_size: int, *, raises: bool):
        self.vocab_size, self.raises, self.calls = vocab_size, raises, 0

    def propose(self, inputs: DraftInputs) -> Proposal:
        self.calls += 1
        if self.raises:
            raise RuntimeError("broken")
        size, depth = len(inputs.num_draft), int(inputs.num_draft.max())
        logits = torch.full((size, depth, self.vocab_size), torch.nan)
        logits[:, 0] = 0.0
        return Proposal(
            tokens=torch.full((size, depth), 40), lengths=inputs.num_draft, logits=logits
        )


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("params, rests", [(SEEDED, False), (SAMPLED, True), (GREEDY, True)])
def test_a_draft_does_not_rest_by_draws_that_can_be_repeated(
    params: SamplingParams,
    rests: bool,
    raises: bool,
    target: Target,
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = Broken(target.vocab_size, raises=raises)
    engine = build_engine(target, drafter, EngineConfig(k=3, compile="off"))
    serve(engine, params)
    (failures,) = engine.stats.fallbacks.values()
    assert (engine.draft._failures > 0) == rests
    if rests:
        assert drafter.calls < 10
        return
    assert failures > 15
    told = [line for line in caplog.messages if "seeded" in line]
    assert 1 < len(told) <= failures.bit_length(), "not in every round"


@pytest.mark.parametrize(
    "params, learn, num_texts",
    [(SEEDED, True, 0), (SAMPLED, True, 1), (GREEDY, True, 1), (SAMPLED, False, 0)],
)
def test_text_is_shared_by_those_that_draw_once_and_may_be_learned_from(
    params: SamplingParams, learn: bool, num_texts: int, target: Target
) -> None:
    drafter = Suffix()
    serve(build_engine(target, drafter, EngineConfig(k=3, compile="off")), params, learn=learn)
    assert drafter.shared.num_texts == num_texts


def test_seeds_that_differ_draw_differently(target: Target) -> None:
    engine = build_engine(target, None, EngineConfig(compile="off"))
    seeds = [3, 3 + 2**62, 3 - 2**62, 3 + 2**63 - 2**64, -3]
    answers = [
        tuple(engine.generate([PROMPT], replace(SAMPLED, seed=seed))[0].tokens)
        for seed in [*seeds, seeds[0]]
    ]
    assert len(set(answers[:-1])) == len(seeds) and answers[-1] == answers[0]


def test_servers_repeat_each_others_answers_under_one_seed_alone(
    target: Target, fixed_drafter: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_processor, "secrets", secrets)  # which the other tests settle

    def answers(config: EngineConfig) -> list[list[int]]:
        done = build_engine(target, fixed_drafter(sharpness=0.5), config).generate(
            [PROMPT] * 4, SAMPLED
        )
        return [one.tokens for one in done]

    default = EngineConfig(k=2, compile="off")
    first, second = answers(default), answers(default)
    assert not any(one == other for one, other in zip(first, second, strict=True))
    told = replace(default, seed=5)
    assert answers(told) == answers(told)
