"""Rounds from what a server reports, and records that say no more than is known."""

from __future__ import annotations

import io

import numpy as np
import pytest

from draftsmith.distill.buffer import record_table
from draftsmith.distill.buffer.traffic import Role, branched, stitch
from draftsmith.distill.monitor.positions import positions_of
from draftsmith.fleet.config import DefaultSampling
from draftsmith.fleet.observe.rounds import (
    ObservedSampling,
    ObservedStep,
    TokenCounter,
    records_of,
    sampling_of,
    steps_of,
)
from draftsmith.record import UNLOGGED, RecordHead, RoundRecord, hashed
from tests.round_records import Distribution, each, file_of

TOKENS = TokenCounter([1, 2, 3], [10, 11, 12, 13, 14, 15])
HEAD = RecordHead(hashed("cmpl-a-0"), draft_version="4", sampler="greedy")


def report(drafted: list[int], accepted: list[int]) -> dict[str, list[int]]:
    return {"per_step_drafted": drafted, "per_step_accepted": accepted}


def test_steps_follow_the_first_token_where_they_add_up() -> None:
    steps = [ObservedStep(1, 3, 2, 3), ObservedStep(4, 3, 0, 1), ObservedStep(5, 3, 3, 1)]
    assert steps_of(report([3, 3, 3], [2, 0, 3]), 6) == steps  # the last one is cut
    assert steps_of(report([3, 3], [2, 1]), 6) == [*steps[:1], ObservedStep(4, 3, 1, 2)]


@pytest.mark.parametrize(
    "reported",
    [
        {},
        report([3, 3], [2, 0]),  # a token without a step
        report([3, 3, 3], [2, 1, 0]),  # a step behind the end
        report([3], [2, 3]),
        report([1, 3], [2, 1]),  # more accepted than drafted
    ],
)
def test_steps_that_do_not_add_up_are_not_known(reported: dict[str, list[int]]) -> None:
    assert steps_of(reported, 6) is None


def test_given_places_are_taken() -> None:
    places = {"per_step_begin": [2, 5], "per_step_committed": [2, 1]}
    found = steps_of(report([2, 4], [1, 0]) | places, 6)
    assert found == [ObservedStep(2, 2, 1, 2), ObservedStep(5, 4, 0, 1)]
    assert steps_of(report([2, 4], [1, 0]) | places, 5) is None


def made(steps: list[ObservedStep] | None, *, adjusts: bool = False) -> list[RoundRecord]:
    records = records_of(TOKENS, steps, HEAD, adjusts=adjusts)
    return record_table.from_table(record_table.read(io.BytesIO(file_of(records))))


def test_records_hold_the_accepted_ids_and_no_others() -> None:
    records = made([ObservedStep(1, 3, 2, 3), ObservedStep(4, 2, 0, 1), ObservedStep(5, 3, 3, 1)])
    text = stitch(records)
    assert text is not None and text.tokens == [*TOKENS.prompt, *TOKENS.answer]
    assert text.roles.tolist() == [
        *[Role.CONTEXT] * 4, Role.ACCEPTED, Role.ACCEPTED, Role.FIRST_REJECTED,
        Role.FIRST_REJECTED, Role.ACCEPTED,
    ]  # fmt: skip
    assert [one.drafted for one in records] == [
        [11, 12, UNLOGGED], [UNLOGGED] * 2, [15, UNLOGGED, UNLOGGED], [],
    ]  # fmt: skip
    assert [one.emitted for one in records] == [13, 14, UNLOGGED, UNLOGGED]
    assert [len(one.q) for one in records] == [0] * 4
    assert [len(one.p) for one in records] == [3, 1, 1, 0]
    assert [one.draft_version for one in records] == ["4", "4", "4", ""]
    assert records[-1].last and records[0].request == hashed("cmpl-a-0")
    # What was drafted behind a rejected token is not known, and no evidence of losslessness is.
    assert branched(text) == [] and positions_of(records) is None


def test_unknown_rounds_are_single_tokens_to_learn_from_and_to_score() -> None:
    records = made(None)
    text = stitch(records)
    assert text is not None and text.tokens == [*TOKENS.prompt, *TOKENS.answer] and text.is_scorable
    assert text.roles.tolist() == [Role.CONTEXT] * 3 + [Role.BONUS] * 6
    assert all(not one.drafted and one.draft_version == "" for one in records)
    assert [len(one.p) for one in records] == [1] * 6 + [0]


def test_p_has_no_values_and_no_place_where_more_than_four_numbers_made_it() -> None:
    (first, *_) = made([ObservedStep(1, 3, 2, 3)])
    assert len(first.p) == 3 and each(first.p)[0] == Distribution()
    (first, *_) = made([ObservedStep(1, 3, 2, 3)], adjusts=True)
    assert len(first.p) == 0


def test_sampling_of_a_request() -> None:
    defaults = DefaultSampling(temperature=0.6, top_k=20)
    assert sampling_of({"prompt": "x"}, defaults) == ObservedSampling(
        0.6, 20, 1.0, 0.0, False, False
    )
    named = {"temperature": 0.5, "top_k": -1, "top_p": 0.9, "seed": 3, "n": 1}
    assert sampling_of(named, defaults) == ObservedSampling(0.5, 0, 0.9, 0.0, True, False)
    assert not sampling_of({"temperature": 0, "seed": 3}, defaults).seeded
    assert sampling_of({"mirostat": 2}, defaults).adjusts
    assert sampling_of({"presence_penalty": 0.1}, defaults).adjusts
    neutral = {"presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}}
    assert not sampling_of(neutral, defaults).adjusts
    assert np.isfinite(sampling_of({}, DefaultSampling()).temperature)
