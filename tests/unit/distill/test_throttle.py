"""The share of the wall time that learning takes, alone and beside a server whose latency it must
not raise."""

from __future__ import annotations

import math
import threading
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from draftsmith.client import parse
from draftsmith.distill.throttle import (
    LEAST,
    LOOK_S,
    MOST_REST_S,
    LatencyGuard,
    Throttle,
    quantile,
    scraper,
)
from draftsmith.errors import UserError


class Time:
    """A clock and an event that passes it by waiting."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.longest_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def is_set(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("budget", "guard", "share"), [(1.0, 1.0, 1.0), (0.25, 1.0, 0.25), (0.5, 0.5, 0.25)]
)
def test_work_is_the_budgets_share_of_the_time(budget: float, guard: float, share: float) -> None:
    time = Time()
    throttle = Throttle(budget, time, guard=lambda: guard, clock=time)  # type: ignore[arg-type]
    for worked_s in (1.0, 0.1, 3.0):
        time.now_s += worked_s
        throttle.rest(worked_s)
    with throttle.work():
        time.now_s += 2.0
    while not throttle.pay():
        pass
    assert time.longest_s <= MOST_REST_S
    assert throttle.worked_s == pytest.approx(
        6.1
    ) and throttle.worked_s / time.now_s == pytest.approx(share)
    assert throttle.rested_s == pytest.approx(time.now_s - 6.1)


def test_within_a_long_rest_somebody_looks_up_and_work_is_owed_the_rest_of_it() -> None:
    """At the least share 26 s of scoring are owed 27 minutes."""
    time = Time()
    throttle = Throttle(LEAST, time, clock=time)  # type: ignore[arg-type]
    looked_s: list[float] = []
    throttle.look_up = lambda: looked_s.append(time.now_s)
    with throttle.work():
        time.now_s += 26.0
    assert throttle.rested_s == MOST_REST_S and throttle.owed_s > 25 and not looked_s
    time.now_s += 1.0
    throttle.rest(1.0)
    assert throttle.worked_s / time.now_s == pytest.approx(LEAST) and throttle.owed_s == 0
    assert max(b - a for a, b in pairwise(looked_s)) <= MOST_REST_S and len(looked_s) > 300


def test_long_work_without_a_rest_is_looked_up_from_too() -> None:
    """A step of 2 s on a busy machine: nobody would see for minutes whether it goes on."""
    time, looked_s = Time(), []
    throttle = Throttle(1.0, time, clock=time)  # type: ignore[arg-type]
    throttle.look_up = lambda: looked_s.append(throttle.worked_s)
    for _ in range(7):
        throttle.rest(2.0)
    assert looked_s == [6.0, 12.0] and throttle.rested_s == 0


def test_a_rest_is_short_when_the_server_has_time_again() -> None:
    time = Time()

    def busy() -> float:
        return LEAST if time.now_s < 20 else 1.0

    throttle = Throttle(1.0, time, guard=busy, clock=time)  # type: ignore[arg-type]
    throttle.rest(10.0)
    assert 20 <= time.now_s <= 20 + MOST_REST_S and throttle.owed_s == 0


def test_a_rest_ends_when_the_learner_is_to_stop() -> None:
    stop = threading.Event()
    stop.set()
    throttle = Throttle(1e-6, stop)
    throttle.rest(10.0)
    assert throttle.rested_s < 1.0


class Server:
    """Answers a second that took what it is told to take for a token."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        registry = CollectorRegistry()
        name = "vllm:request_time_per_output_token_seconds"
        self.seconds = Histogram(
            name, "TPOT", ["model_name"], registry=registry, buckets=(0.01, 0.02, 0.05, 0.1)
        ).labels("m")
        self.other = Counter("other", "grows", registry=registry)
        self.registry: CollectorRegistry | None = registry

    def read(self):
        return parse(generate_latest(self.registry).decode()) if self.registry is not None else None


def looks(
    guard: LatencyGuard, server: Server, time: Time, seconds: float | None, count: int
) -> float:
    for _ in range(count):
        for _ in range(20 if seconds is not None else 0):
            server.seconds.observe(seconds)
        time.now_s += LOOK_S
        share = guard.share()
    return share


def test_learning_gives_way_while_the_bound_is_exceeded_and_comes_back() -> None:
    server, time = Server(), Time()
    guard = LatencyGuard(server.read, 0.03, clock=time)
    assert looks(guard, server, time, 0.015, 3) == 1.0 and guard.p95_s < 0.02
    assert looks(guard, server, time, 0.08, 2) == 0.25 and guard.p95_s > 0.05
    time.now_s += LOOK_S / 2
    assert guard.share() == 0.25  # no new look yet
    assert looks(guard, server, time, 0.08, 20) == LEAST
    assert looks(guard, server, time, 0.015, 1) == pytest.approx(LEAST * 1.2)
    assert looks(guard, server, time, None, 30) == 1.0 and math.isnan(guard.p95_s)  # nobody waits


def test_a_server_that_goes_away_or_starts_again_is_no_reason_to_fail() -> None:
    server, time = Server(), Time()
    guard = LatencyGuard(server.read, 0.03, clock=time)
    looks(guard, server, time, 0.08, 3)
    before = guard.share()
    server.registry = None
    assert looks(guard, server, time, None, 1) > before
    server.start()
    # a first reading has nothing to compare with
    assert looks(guard, server, time, 0.08, 1) > before
    server.start()  # its counters fall
    assert math.isfinite(looks(guard, server, time, None, 1))
    before = guard.share()
    assert looks(guard, server, time, 0.08, 1) < before


def test_quantiles_of_a_histogram() -> None:
    buckets = {"0.01": 50.0, "0.02": 100.0, "+Inf": 100.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.01) and quantile(
        buckets, 0.95
    ) == pytest.approx(0.019)
    # beyond all bounds: at least the last one
    assert quantile({"0.01": 0.0, "+Inf": 10.0}, 0.95) == 0.01
    assert math.isnan(quantile({}, 0.95)) and math.isnan(quantile({"0.01": 0.0, "+Inf": 0.0}, 0.95))


def test_where_a_server_is_has_to_be_a_url() -> None:
    with pytest.raises(UserError, match="names no server"):
        scraper("localhost:8000")
    assert scraper("http://127.0.0.1:9")() is None
