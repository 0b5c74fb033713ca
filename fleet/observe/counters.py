"""Counts of what was observed, as Prometheus shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric

PREFIX = "draftsmith_observed_"


@dataclass(eq=False)  # a registry keeps its collectors by their hash
class ProxyCounters:
    requests: int = 0  # of the generating endpoints
    answers: int = 0  # recorded
    tokens: int = 0  # of recorded answers
    drafted: int = 0  # tokens, as the server counts them
    accepted: int = 0
    with_steps: int = 0  # answers whose rounds are known
    with_logprobs: int = 0
    dropped: int = 0  # answers that recording was too slow for
    refused_enrichments: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # answers, by reason

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] += 1

    def line(self) -> str:
        drafted = f", acceptance {self.accepted / self.drafted:.3f}" if self.drafted else ""
        return (
            f"{self.requests} requests, {self.answers} recorded ({self.with_steps} with their "
            f"rounds, {self.with_logprobs} with logprobs), {self.left_out.total()} left out, "
            f"{self.dropped} dropped{drafted}"
        )

    def collect(self) -> Iterator[Metric]:
        for name, value in vars(self).items():
            if isinstance(value, int):
                yield CounterMetricFamily(PREFIX + name, name.replace("_", " "), value=value)
        family = CounterMetricFamily(
            PREFIX + "left_out", "answers that are not recorded", labels=["reason"]
        )
        for reason, count in dict(self.left_out).items():
            family.add_metric([reason], count)
        yield family
