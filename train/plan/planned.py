"""A candidate once it is measured and forecast."""

from __future__ import annotations

from typing import NamedTuple

from draftsmith.train.plan.candidates import Candidate
from draftsmith.train.plan.costs import Cost
from draftsmith.train.plan.expected import Expectation
from draftsmith.train.plan.forecast import Forecast, best, forecast
from draftsmith.train.plan.timing import RoundTimes


class Planned(NamedTuple):
    candidate: Candidate
    cost: Cost
    times: dict[int, RoundTimes]  # by the number of streams
    expectation: Expectation | None  # None where nothing is known of its acceptance
    taps: tuple[int, ...]

    def forecasts(self, streams: int) -> list[Forecast]:
        """One a draft length; none without an expectation."""
        if self.expectation is None:
            return []
        coverage = self.candidate.coverage
        return [forecast(k, cost, self.expectation.tau(k, coverage)) for k, cost in self.times[streams].cost.items()]

    def best(self, streams: int) -> Forecast | None:
        forecasts = self.forecasts(streams)
        return best(forecasts) if forecasts else None
