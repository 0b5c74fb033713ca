"""A small simulated fleet, and the sizes in the guide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.fleet.config import RolloutConfig
from scripts.fleet.model import Shape
from scripts.fleet.simulate import PUBLISHED_S, simulate
from scripts.fleet.simulation import Simulation
from scripts.fleet.sizing import table

ROOT = Path(__file__).resolve().parents[4]
CONFIG = RolloutConfig(switch_s=60.0, pairs=60)
SHAPE = Shape(engines=40, poll_s=5.0, spread_s=30.0)
# Away at the publication, in the midst of a stage, and after it.
FAILING = replace(
    SHAPE, deaths_per_hour=2.0, restart_s=30.0, down=((50.0, 90.0), (400.0, 470.0), (900.0, 930.0))
)


def test_jitter_takes_the_peak_from_the_store_and_all_engines_come() -> None:
    at_once = simulate(replace(SHAPE, has_jitter=False), (), CONFIG, until_s=300.0)
    spread = simulate(SHAPE, (), CONFIG, until_s=300.0)
    assert at_once["share_on_it"] == spread["share_on_it"] == 1.0
    assert at_once["all_on_it_s"] < PUBLISHED_S + 2 * SHAPE.poll_s
    assert spread["all_on_it_s"] < PUBLISHED_S + SHAPE.spread_s + 3 * SHAPE.poll_s
    assert at_once["bytes_per_s"]["peak"] > 5 * spread["bytes_per_s"]["peak"]
    assert at_once["requests_per_s"]["peak"] > 2 * spread["requests_per_s"]["peak"]
    assert at_once["bytes_per_s"]["sum"] == pytest.approx(40e9, rel=0.01)


def test_a_good_candidate_comes_to_every_engine_through_deaths_and_an_absent_store() -> None:
    shape = replace(FAILING, gains=((2, 0.1),))
    run = Simulation(shape, (0.1, 0.5), CONFIG)
    run.run(PUBLISHED_S)
    run.publish(2)
    run.run(3600.0)
    found = run.report(2)
    assert [one["decision"] for one in found["decisions"]] == ["begun", "goes on", "promoted"]
    # Those that have just restarted are on their way.
    assert found["share_on_it"] > 0.8 and run.share_on(1) == 0.0


def test_a_bad_candidate_reaches_only_engines_of_its_stage() -> None:
    shape = replace(FAILING, gains=((2, -0.2),))
    found = simulate(shape, (0.1, 0.5), CONFIG, until_s=3600.0)
    assert [one["decision"] for one in found["decisions"]] == ["begun", "rolled back"]
    assert "accepted less" in found["decisions"][-1]["reason"]
    assert found["share_on_it"] == 0.0 and found["engine_hours_on_it"] < 4.0


def test_a_torn_upload_is_served_by_no_engine() -> None:
    found = simulate(replace(FAILING, torn=(2,)), (0.1, 0.5), CONFIG, until_s=1200.0)
    assert [one["decision"] for one in found["decisions"]] == ["begun", "rolled back"]
    assert found["engine_hours_on_it"] == 0.0 and 1 <= found["refused_by"] <= 4


def test_the_sizes_in_the_guide_are_those_of_the_formulas() -> None:
    guide = (ROOT / "docs/guides/fleet.md").read_text()
    assert "\n".join(table()) in guide, "python -m scripts.fleet.sizing"
