"""A seeded request gives the same tokens at T > 0 whatever happens around it: preemption, chunking,
other rows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from draftsmith.drafters.blocks.dflash import Dflash
from draftsmith.drafters.heads.eagle1 import Eagle1
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.heads.mtp import Mtp
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import (
    DflashOptions,
    DraftLmOptions,
    Eagle1Options,
    Eagle3Options,
    MedusaOptions,
    MtpOptions,
)
from draftsmith.drafters.states.medusa import Medusa
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.requests.request import Request
from draftsmith.serve.sampling.params import SamplingParams

PROMPTS = [[5, 60, 7, 200, 9, 33] * 4, [9, 8, 7], [40 + i % 11 for i in range(33)]]
FAMILIES: dict[str, Callable[[Target], ServingDrafter | None]] = {
    "none": lambda target: None,
    "ngram": lambda target: Ngram(min_n=1, max_n=3),
    "eagle3": lambda target: Eagle3.create(Eagle3Options(), target, seed=1).eval(),
    "eagle1": lambda target: Eagle1.create(Eagle1Options(), target, seed=1).eval(),
    "mtp": lambda target: Mtp.create(MtpOptions(), target, seed=1).eval(),
    "medusa": lambda target: Medusa.create(MedusaOptions(), target, seed=1).eval(),
    "dflash": lambda target: Dflash.create(DflashOptions(), target, seed=1).eval(),
    # The target's own weights: nearly every draft is kept, so round ends depend on the draws.
    "draft-lm": lambda target: DraftLm.create(
        DraftLmOptions(init=target.name), target, seed=1
    ).eval(),
}
# Families and ways to verify, each with what the engine is told.
CASES: list[tuple[str, dict[str, str]]] = [
    *((family, {}) for family in FAMILIES),
    ("draft-lm", {"verification": "block"}),
    ("eagle3", {"tree": "sampled:3x2x1"}),
]


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"))


def params(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9, top_k=20, seed=100 + index, max_tokens=24, ignore_eos=True
    )


def finish(
    engine: Engine, requests: list[Request], *, preempt: random.Random | None = None
) -> list[list[int]]:
    while engine.busy:
        engine.step()
        if preempt is not None and engine.scheduler.running and preempt.random() < 0.4:
            engine.scheduler.preempt(engine.scheduler.running[-1])
    return [request.output for request in requests]


def alone(target: Target, drafter: ServingDrafter | None, told: dict[str, str]) -> list[list[int]]:
    outputs = []
    for index, prompt in enumerate(PROMPTS):
        engine = build_engine(
            target, drafter, EngineConfig(k=3, max_batch=1, compile="off", **told)
        )
        outputs += finish(engine, [engine.submit(prompt, params(index))])
    return outputs


@pytest.mark.parametrize("family, told", CASES, ids=lambda value: str(value))
def test_tokens_do_not_depend_on_preemption_chunking_or_rows(
    family: str, told: dict[str, str], target: Target
) -> None:
    drafter = FAMILIES[family](target)
    expected = alone(target, drafter, told)
    for chunk, seed, cache in ((512, 1, False), (7, 2, True), (16, 3, False), (16, 4, True)):
        config = EngineConfig(
            k=3,
            max_batch=4,
            max_round_tokens=chunk,
            block_size=8,
            prefix_cache=cache,
            compile="off",
            **told,
        )
        engine = build_engine(target, drafter, config)
        for k in (0, None):
            engine.submit([50 + seed] * 9, SamplingParams(max_tokens=12, k=k, ignore_eos=True))
        requests = [engine.submit(prompt, params(index)) for index, prompt in enumerate(PROMPTS)]
        assert finish(engine, requests, preempt=random.Random(seed)) == expected
        assert sum(request.num_preemptions for request in requests) > 0
        assert not engine.stats.fallbacks


def test_a_token_decided_while_refilling_would_be_noticed(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the rule that a refill decides nothing the same request goes on with
    other tokens."""
    from draftsmith.serve.engine.scheduler import Row, Schedule, Scheduler

    def deciding(self: Scheduler, schedule: Schedule, request: Request, budget: int) -> int:
        row = Row(
            request,
            request.cache.computed,
            min(budget, request.num_tokens - request.cache.computed),
        )
        (schedule.sampling if row.samples else schedule.filling).append(row)
        return row.count

    drafter = FAMILIES["draft-lm"](target)
    expected = alone(target, drafter, {})
    monkeypatch.setattr(Scheduler, "_piece", deciding)
    engine = build_engine(target, drafter, EngineConfig(k=3, max_batch=4, compile="off"))
    requests = [engine.submit(prompt, params(index)) for index, prompt in enumerate(PROMPTS)]
    assert finish(engine, requests, preempt=random.Random(1)) != expected
