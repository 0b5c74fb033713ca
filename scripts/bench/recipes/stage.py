"""`draftsmith` whose `minutes` of a training are CPU time, so that other work on the machine costs a
draft no training. In place of the command in the stages of a pipeline."""

from __future__ import annotations

import sys

from draftsmith.cli import main
from draftsmith.train import session
from scripts.bench.drafters.training import MeteredClock

if __name__ == "__main__":
    session.Clock = MeteredClock  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
