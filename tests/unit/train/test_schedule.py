from __future__ import annotations

import time

import pytest

from draftsmith.train.config import OptimConfig
from draftsmith.train.optim import Clock, lr_factor


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_warms_up_and_comes_down_to_final(schedule):
    config = OptimConfig(warmup=0.1, schedule=schedule, final=0.2)
    factors = [lr_factor(config, share / 100) for share in range(101)]
    assert factors[0] == pytest.approx(0.01) and factors[5] == pytest.approx(0.5)
    assert factors[10] == pytest.approx(1.0) and factors[-1] == pytest.approx(0.2)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[55] == pytest.approx(0.6)


def test_constant_stays_at_the_peak_and_no_warmup_is_no_warmup():
    assert lr_factor(OptimConfig(schedule="constant", warmup=0.0), 0.0) == 1.0
    assert lr_factor(OptimConfig(schedule="constant"), 1.0) == 1.0


def test_time_or_steps_whichever_is_further():
    clock = Clock(total_steps=100, budget_s=50.0)
    clock.elapsed_s = 40.0
    assert clock.share_done(10) == pytest.approx(0.8)
    assert clock.share_done(90) == pytest.approx(0.9)
    assert not clock.out_of_time()
    clock.elapsed_s = 60.0
    assert clock.share_done(0) == 1.0 and clock.out_of_time()


def test_a_resumed_clock_goes_on_from_what_was_spent():
    clock = Clock(total_steps=100, budget_s=50.0)
    clock.start(elapsed_s=30.0)
    time.sleep(0.02)
    assert 30.02 <= clock.tick() < 31.0


def test_without_a_budget_time_does_not_count():
    clock = Clock(total_steps=100, budget_s=None)
    clock.elapsed_s = 1e9
    assert clock.share_done(1) == pytest.approx(0.01) and not clock.out_of_time()
