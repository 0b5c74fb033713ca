"""Parsed text of a server's /metrics, and the difference of two."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from draftsmith.errors import UserError

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scrape:
    gauges: dict[str, dict[Labels, float]]
    # buckets, sums and counts of histograms are counters, too
    counters: dict[str, dict[Labels, float]]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples that carry `labels`; 0 where there is none."""
        wanted = labels.items()
        return sum(
            value for found, value in self._of(name).items() if wanted <= dict(found).items()
        )

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the values of `label`."""
        values = {dict(found).get(label, "") for found in self._of(name)}
        return {value: self.total(name, **{label: value}, **labels) for value in sorted(values)}

    def has(self, name: str) -> bool:
        return bool(self._of(name))

    def _of(self, name: str) -> dict[Labels, float]:
        return self.counters.get(name) or self.gauges.get(name) or {}

    def since(self, earlier: Scrape) -> Scrape:
        """Counters since `earlier`; gauges as they are now."""
        counters = {
            name: {
                labels: value - earlier.counters.get(name, {}).get(labels, 0.0)
                for labels, value in samples.items()
            }
            for name, samples in self.counters.items()
        }
        if any(value < 0 for samples in counters.values() for value in samples.values()):
            raise UserError("the server was restarted meanwhile; run the command again")
        return Scrape(self.gauges, counters)


def parse(text: str) -> Scrape:
    gauges: dict[str, dict[Labels, float]] = {}
    counters: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            kept = counters if family.type in ("counter", "histogram") else gauges
            for sample in family.samples:
                kept.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = (
                    sample.value
                )
    except ValueError as error:
        raise UserError(
            f"/metrics is no Prometheus text ({str(error)[:60]}); give the URL of a draftsmith "
            "server"
        ) from error
    return Scrape(gauges, counters)
