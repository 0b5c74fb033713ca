"""Losses of a storm: those that a killed writer explains, and all others."""

from __future__ import annotations

import dataclasses

from draftsmith.record import RoundRecord, hashed
from tests.storm.kills import TURNS, Answer, Failure, Kill, Log, Struck, planned
from tests.storm.survived import (
    behind,
    failures,
    greedy,
    served_after,
    texts,
    versions_of,
    windows,
)

ROUND = RoundRecord(
    "", 0, "", "t", "rev", "1", 103.0, 1.0, 0, 1.0, 0.0, 2, [5, 6], [7, 8, 9], 1, [7, 3], 3, last=True
)  # fmt: skip


def answer(name: str, engine: str, ended_s: float, tokens: tuple[int, ...] = (7, 3)) -> Answer:
    return Answer(name, [5, 6], list(tokens), engine, 0, ended_s - 1, ended_s)


def records_of(*names: str) -> dict[str, list[RoundRecord]]:
    full = {name: hashed(f"{name}-0") for name in names}
    return {
        one.partition("-")[0]: [dataclasses.replace(ROUND, request=one)] for one in full.values()
    }


def test_only_what_a_killed_writer_had_is_an_admitted_loss() -> None:
    struck = [Struck(Kill("writer", "a"), 110.0, 111.0), Struck(Kill("server", "b"), 110.0)]
    log = Log(struck=struck)
    log.answers = [
        answer("kept", "a", 100.0), answer("late", "a", 109.0), answer("running", "a", 111.2),
        answer("early", "a", 107.0), answer("after", "a", 113.0), answer("other", "b", 109.5),
        answer("changed", "a", 100.0, (7, 4)),
    ]  # fmt: skip
    found = texts(log, records_of("kept", "changed"), 2.0)
    assert found["recorded"] == 1 and found["changed"] == ["changed"]
    assert found["lost_elsewhere"] == ["early", "after", "other"]
    assert found["lost_where_admitted"] == 2 and found["finished_before_the_kill"] == 1
    assert found["oldest_lost_s"] == 1.0 and behind(log, records_of("kept")) == 3.0
    assert greedy(log, {0: [7, 3]}) == {"greedy": 7, "greedy_equal": 6}


def test_a_writer_killed_while_the_place_is_away_loses_all_since_it_left() -> None:
    struck = [
        Struck(Kill("store"), 100.0, 104.0), Struck(Kill("store"), 106.0, 110.0),
        Struck(Kill("writer", "a"), 109.0, 110.0), Struck(Kill("writer", "b"), 120.0, 121.0),
    ]  # fmt: skip
    assert [one.begin_s for one in windows(struck, 2.0)] == [98.0, 118.0]


def test_versions_that_do_not_verify_are_named() -> None:
    log = Log(reported={"a": {1, 2}, "b": {900}}, refused={"a": {900}})
    found = versions_of(log, records_of("kept"), [1, 2])
    assert found == {"reported": [1, 2, 900], "unverified": [900], "refused": {"a": [900]}}


def test_only_a_killed_engine_explains_a_failed_request() -> None:
    struck = [Struck(Kill("server", "a"), 10.0, 20.0), Struck(Kill("writer", "b"), 10.0, 11.0)]
    failed = [
        Failure("a", 9.0, 10.1), Failure("a", 19.0, 25.0), Failure("a", 20.5, 21.0),
        Failure("a", 8.0, 9.0), Failure("b", 10.0, 10.5),
    ]  # fmt: skip
    found = failures(Log(struck=struck, failed=failed))
    assert found["failed"] == 5
    assert found["failed_elsewhere"] == [list(one) for one in failed[2:]]


def test_answers_after_the_storm_are_those_begun_when_all_was_back() -> None:
    log = Log(struck=[Struck(Kill("core", "a"), 10.0, 20.0), Struck(Kill("store"), 12.0, 15.0)])
    log.answers = [answer("x", "a", 21.5), answer("y", "b", 20.5)]
    assert served_after(log, ["a", "b"]) == {"a": 1, "b": 0}
    log.struck.append(Struck(Kill("core", "b"), 16.0))
    assert served_after(log, ["a", "b"]) == {"a": 0, "b": 0}


def test_kills_are_of_every_kind_and_spread_over_engines() -> None:
    kills = planned(["a", "b"], 30, 0)
    assert kills == planned(["a", "b"], 30, 0) != planned(["a", "b"], 30, 1)
    assert {one.what for one in kills} == set(TURNS)
    assert sum(one == Kill("writer", "a") for one in kills) == 5
