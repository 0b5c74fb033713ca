"""How drafts are drawn, and what records say of it; their distribution is held in
`tests/integration/test_served_distribution.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.record import RoundRecord, Sink
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import draft_temperature
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.sampling.params import SamplingParams
from tests.round_records import each
from tests.stand_in_drafts import near

PROMPT = [5, 60, 7, 200, 9, 33]
LENGTH, K = 3, 2
# More than is looked at: the last tokens of an answer are drafted less deep.
SAMPLED = {"temperature": 1.3, "top_k": 4, "max_tokens": LENGTH + K, "ignore_eos": True}


@pytest.fixture(scope="module")
def drafter(target: Target) -> DraftLm:
    """The target with some noise: drafts that are kept often, but not always."""
    return near(target, 0.03)


def make_engine(
    target: Target, drafter: DraftLm, sink: Sink | None = None, **config: object
) -> EngineCore:
    return build_engine(
        target,
        drafter,
        EngineConfig(
            k=K, max_batch=64, max_round_tokens=1024, max_length=64, compile="off", **config
        ),
        sink=sink,
        draft_version="1",
    )


def test_greedy_drafts_are_the_drafts_likeliest_tokens(target: Target, drafter: DraftLm) -> None:
    """Asked for by the server or by the request: the same drafts, whatever the seed."""
    drafted: list[list[list[int]]] = []
    for config, params in (({"draft_sampling": "greedy"}, {}), ({}, {"draft_temperature": 0.0})):
        engine = make_engine(target, drafter, **config)
        inner, seen = engine.proposer.propose, []

        def watched(*args, inner=inner, seen=seen, **kwargs):
            found = inner(*args, **kwargs)
            seen.append(found.drafted[0, : found.sizes[0]].tolist())
            return found

        engine.proposer.propose = watched
        engine.generate(
            [PROMPT],
            SamplingParams(
                temperature=1.0, top_k=1, max_tokens=8, seed=3, ignore_eos=True, **params
            ),
        )
        drafted.append(seen)
    assert drafted[0] == drafted[1] and len(drafted[0]) > 1


def test_a_requests_own_draft_temperature_wins_and_greedy_requests_draft_greedily() -> None:
    own, greedy, plain = (
        SamplingParams(draft_temperature=0.3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
    )
    rows = [own, greedy, plain]
    for wanted, expected in ((True, [0.3, 0.0, 0.0]), (False, [0.3, 0.0, 0.7])):
        assert [draft_temperature(row, greedy=wanted) for row in rows] == expected


@pytest.mark.parametrize("value", [-0.1, 1e-9, float("nan"), 101.0])
def test_draft_temperatures_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(UserError, match="draft_temperature"):
        SamplingParams(draft_temperature=value)


@pytest.mark.parametrize("config, params, sampler", [
    ({}, {}, "probabilistic"),
    ({}, {"temperature": 0.0}, "greedy"),
    ({}, {"draft_temperature": 0.0}, "greedy"),
    ({}, {"draft_temperature": 0.5}, "tempered"),
    ({"draft_sampling": "greedy"}, {}, "greedy"),
    ({"draft_sampling": "greedy"}, {"draft_temperature": 1.3}, "probabilistic"),
])  # fmt: skip
def test_records_name_the_choice_of_drafted_tokens(
    config: dict,
    params: dict,
    sampler: str,
    target: Target,
    drafter: DraftLm,
    records: list[RoundRecord],
) -> None:
    engine = make_engine(target, drafter, sink=records, **config)
    engine.generate([PROMPT], SamplingParams(**{**SAMPLED, **params}))
    drafted = [one for one in records if one.drafted]
    assert drafted and {one.sampler for one in drafted} == {sampler}
    if sampler == "greedy":
        assert all(len(q.ids) == 1 or q.logprobs[0] == 0 for one in drafted for q in each(one.q))


def test_records_of_tokens_that_are_not_drawn_name_them_greedy(
    target: Target,
    fixed_drafter: Callable,
    records: list[RoundRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = fixed_drafter()
    drawn = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda inputs: replace(drawn(inputs), logits=None))
    make_engine(target, drafter, sink=records).generate([PROMPT], SamplingParams(**SAMPLED))
    drafted = [one for one in records if one.drafted]
    assert drafted and {one.sampler for one in drafted} == {"greedy"}
