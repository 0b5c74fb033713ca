"""History in bounded memory, rates from counts, and what the same tokens would have taken without
drafts."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.latency import LatencyTable, bucket_of
from draftsmith.serve.dashboard.samples import (
    Counts,
    History,
    Span,
    by_class,
    plain_seconds,
    summary,
)
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.metrics.server import ServerMetrics
from draftsmith.serve.requests.request import RequestOptions, SpeculationStats
from draftsmith.serve.sampling.params import SamplingParams


@pytest.fixture
def engine(target: Target, fixed_drafter: Callable) -> Engine:
    return build_engine(
        target, fixed_drafter(sharpness=0.5), EngineConfig(k=3, max_batch=4, compile="off")
    )


def counted(*rounds: tuple[int, int, int]) -> Counts:
    acceptance = AcceptanceCounts()
    acceptance.add(*zip(*rounds))
    return Counts.of(acceptance)


def test_counts_give_the_one_definition_of_alpha_and_tau() -> None:
    rounds = [(3, 3, 4), (3, 0, 1), (2, 1, 2), (3, 2, 2)]
    acceptance = AcceptanceCounts()
    acceptance.add(*zip(*rounds))
    counts = Counts.of(acceptance)
    assert counts.tau == acceptance.tau and counts.alpha == acceptance.alpha
    # What happened between two moments, and moments together.
    early = counted(*rounds[:1])
    assert counts.since(early) == counted(*rounds[1:])
    assert Counts.total([early, counts.since(early)]) == counts
    assert Counts.total([]) == Counts() and Counts().tau is None


def test_points_add_up_to_what_the_engine_counted(engine: Engine) -> None:
    history = History(engine, {})
    history.recent.every_s = 0.0
    for seed in range(3):
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=9, seed=seed, ignore_eos=True))
        history.look()
    points = history.recent.since(0.0)
    assert [one["tokens"] for one in points] == [9, 9, 9]
    told, acceptance = summary(points), engine.stats.acceptance
    assert (
        told["tau"] == acceptance.tau
        and told["alpha"] == acceptance.alpha
        and told["rounds"] == acceptance.rounds
    )
    assert told["busy_tokens_per_s"] > 0 and told["speedup"] is None, (
        "a fixed k measures no rounds without drafts"
    )
    assert history.recent.since(points[1]["time_s"]) == points[2:]
    json.dumps(points, allow_nan=False)


def test_nothing_happened_is_no_division_by_zero(engine: Engine) -> None:
    history = History(engine, {})
    history.recent.every_s = 0.0
    history.look()
    told = summary(history.recent.since(0.0))
    assert (told["tau"], told["alpha"], told["speedup"], told["busy_tokens_per_s"]) == (
        None,
        [],
        None,
        None,
    )
    assert summary([])["tokens_per_s"] is None


def test_rings_are_bounded_and_keep_the_latest(engine: Engine) -> None:
    span = Span(0.0, 5)
    history = History(engine, {})
    history.recent = span
    for _ in range(12):
        history.look()
    assert len(span.points) == 5
    times = [one["time_s"] for one in span.points]
    assert times == sorted(times)
    # The coarse ring takes no point before its time has come.
    assert len(history.day.points) == 0


def test_auto_control_tells_what_rounds_without_drafts_take(
    target: Target, fixed_drafter: Callable
) -> None:
    engine = build_engine(
        target,
        fixed_drafter(sharpness=0.5),
        EngineConfig(k=3, adaptive=True, max_batch=4, compile="off"),
    )
    history = History(engine, {})
    history.recent.every_s = 0.0
    for k in range(engine.config.k + 1):
        for _ in range(20):
            engine.scheduler.control.latency.add(bucket_of(1), k, 0.5 if k == 0 else 0.01)
    # this machine's own rounds are far quicker
    engine.scheduler.control.observe = lambda result: None
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=60, ignore_eos=True))
    history.look()
    told = summary(history.recent.since(0.0))
    # So slow plain rounds that each token kept from a draft saves half a second.
    saved = told["plain_tokens_per_s"] * told["speedup"]
    assert saved == pytest.approx(told["busy_tokens_per_s"]) and told["speedup"] > 2


def table(seconds: dict[int, float], rows: int) -> LatencyTable:
    latency = LatencyTable()
    for k, cost_s in seconds.items():
        for _ in range(3):
            latency.add(bucket_of(rows), k, cost_s)
    latency.settle()
    return latency


def test_plain_seconds_by_hand() -> None:
    # 10 rounds of 2 rows at k = 2 commit 50 tokens; 0.3 s each with drafts, 0.2 s without: 25 plain
    # rounds.
    drafting = Counts(rounds=20, committed=50)
    seconds = plain_seconds(
        table({0: 0.2, 2: 0.3}, 2),
        busy_s=10 * 0.3,
        tokens=50,
        drafting=drafting,
        rounds_by_k={2: 10, 1: 0},
    )
    assert seconds == pytest.approx(25 * 0.2, rel=0.02)
    # A second of reading prompts is there with drafts and without.
    seconds = plain_seconds(
        table({0: 0.2, 2: 0.3}, 2), busy_s=4.0, tokens=50, drafting=drafting, rounds_by_k={2: 10}
    )
    assert seconds == pytest.approx(1.0 + 25 * 0.2, rel=0.02)
    # Rounds without drafts alone take what they take.
    seconds = plain_seconds(
        table({0: 0.2}, 2), busy_s=2.0, tokens=20, drafting=Counts(), rounds_by_k={0: 10}
    )
    assert seconds == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("measured", [{2: 0.3}, {0: 0.2}, {}])
def test_plain_seconds_are_not_invented(measured: dict[int, float]) -> None:
    drafting = Counts(rounds=20, committed=50)
    assert (
        plain_seconds(
            table(measured, 2), busy_s=3.0, tokens=50, drafting=drafting, rounds_by_k={2: 10}
        )
        is None
    )
    assert (
        plain_seconds(
            table({0: 0.2, 2: 0.3}, 2), busy_s=0.0, tokens=0, drafting=Counts(), rounds_by_k={}
        )
        is None
    )


def test_classes_are_counted_when_requests_finish(engine: Engine) -> None:
    metrics = ServerMetrics(engine, "tiny")
    history = History(engine, metrics.by_class)
    history.recent.every_s = 0.0
    for name, seed in (("code", 1), ("code", 2), ("", 3)):
        request = engine.submit(
            [5, 6, 7],
            SamplingParams(max_tokens=20, seed=seed, ignore_eos=True),
            options=RequestOptions(request_class=name),
        )
        while not request.finished:
            engine.step()
        metrics.finished(request)
    history.look()
    told = by_class(history.recent.since(0.0))
    assert list(told) == ["", "code"]
    assert sum(one["rounds"] for one in told.values()) == engine.stats.acceptance.rounds
    assert all(one["tau"] >= 1 for one in told.values())


def test_a_round_that_a_stop_trimmed_rejects_nothing(engine: Engine) -> None:
    metrics = ServerMetrics(engine, "tiny")
    request = engine.submit([5, 6, 7], SamplingParams(max_tokens=2))
    request.speculation = SpeculationStats(
        offered=[3, 3], accepted=[1, 2], committed=[2, 2], num_passes=2, num_committed=4
    )
    metrics.finished(request)
    # The first round rejected its second draft; the second one's third was never known.
    counts = metrics.by_class[""]
    assert (counts.offered, counts.accepted) == ([2, 2, 0], [2, 1, 0])
