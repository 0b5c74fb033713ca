"""Trains a draft as `draftsmith train` does, measured. Started by scripts/bench_drafters.

`--minutes` is counted by the meter: in the process's own CPU time where no CUDA computes, so that
other work on the machine costs a draft no training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from draftsmith.cli import main as draftsmith
from draftsmith.train import session
from draftsmith.train.optim import Clock
from scripts.bench.drafters.meter import Meter

METER = Meter()
REPORT: dict[str, float] = {}


class MeteredClock(Clock):
    """From the first step to the last: loading before and saving after are no training."""

    def start(self, elapsed_s: float = 0.0) -> None:
        self.elapsed_s = elapsed_s
        METER.start()

    def tick(self) -> float:
        self.elapsed_s = METER.seconds()
        if self.out_of_time():
            REPORT.update(METER.report())
        return self.elapsed_s


def main() -> int:
    """The job is a JSON file: the arguments of `draftsmith train` and out."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    session.Clock = MeteredClock  # type: ignore[misc]
    out = Path(job["out"])
    status = draftsmith(["train", *job["arguments"], "--out", str(out / "draft"), "--no-resume"])
    if status == 0:
        last = json.loads(
            (out / "draft" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        )
        record = {"steps": last["step"], "passes": last["epoch"], **REPORT}
        (out / "trained.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
