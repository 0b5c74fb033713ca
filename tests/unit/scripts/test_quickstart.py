"""Stages of scripts/quickstart: sized by the machine, explained, and with a shipped draft that fits
the shipped target."""

from __future__ import annotations

import logging

import pytest

from draftsmith.drafters import checkpoint
from draftsmith.drafters.target.target import Target
from scripts.demo.machine import sizes_of
from scripts.demo.stages import SHIPPED_DRAFT, SHIPPED_TARGET, stages

INSTALLATION_S = 150
MOST_S = 12 * 60


@pytest.mark.parametrize("pace", [3.0, 1.0, 0.5, 0.3])
def test_a_slow_machine_does_less_in_the_same_time(pace: float) -> None:
    plan = stages(train_target=False, train_draft=False, sizes=sizes_of(pace))
    assert sum(stage.seconds for stage in plan) + INSTALLATION_S <= MOST_S
    assert all(stage.proves and stage.summary for stage in plan)
    assert sizes_of(pace).answers <= sizes_of(1.0).answers


def test_speed_is_shown_before_anything_is_trained() -> None:
    names = [stage.name for stage in stages(False, False, sizes_of(1.0))]
    assert names.index("pad") < names.index("speed") < names.index("generate")
    assert "draft" in [stage.name for stage in stages(False, True, sizes_of(1.0))]
    # Its tokenizer is that of the shipped target.
    assert "speed" not in [stage.name for stage in stages(True, False, sizes_of(1.0))]


def test_the_shipped_draft_is_small_and_made_for_the_shipped_target(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert sum(file.stat().st_size for file in SHIPPED_DRAFT.iterdir()) <= 8_000_000
    caplog.set_level(logging.WARNING)
    draft = checkpoint.load(SHIPPED_DRAFT, Target.load(SHIPPED_TARGET))
    assert draft.family == "eagle3" and "other weights" not in caplog.text
