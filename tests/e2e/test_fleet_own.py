"""draftsmith's own engine and learner over the prompts of scripts/bench_fleet loop, for the table
beside a fleet's."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.fleet.loop import COMMAND
from scripts.bench.fleet.own import measured
from scripts.bench.fleet.shipped import shipped_run
from scripts.demo.traffic import Shift, traffic

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_every_request_of_the_own_engine_is_in_its_figures(tmp_path: Path) -> None:
    run = shipped_run(tmp_path / "shipped")
    shift = Shift(run / "target", run / "eagle3", tmp_path, 3, code=4, prose=12, max_tokens=16)
    found = measured(shift, traffic(shift), COMMAND)
    assert found["failed"] == 0
    assert found["code"]["rounds"] > 0 and all(one["rounds"] for one in found["parts"])
    rounds = sum(one["rounds"] for one in found["prose"].values())
    assert rounds == sum(one["rounds"] for one in found["parts"])
    assert 0 < found["last_quarter"]["alpha"] < 1
