"""Histogram of the time between updates, which is kept without prometheus_client's locks."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from draftsmith.serve.metrics.server import SECONDS, Gaps


def test_it_reads_as_the_librarys_own_histogram() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    gaps = Gaps('a "model"')
    ours.register(gaps)
    own = Histogram(Gaps.NAME, Gaps.TEXT, ["model_name"], registry=theirs, buckets=SECONDS)
    labelled = own.labels('a "model"')
    for seconds in (0.0005, 0.001, 0.0011, 0.5, 119.0, 120.0, 121.0):
        gaps.observe(seconds)
        labelled.observe(seconds)

    def lines(registry: CollectorRegistry) -> list[str]:
        text = generate_latest(registry).decode().splitlines()
        return [line for line in text if not line.startswith(f"{Gaps.NAME}_created{{")]

    assert lines(ours) == lines(theirs)
    assert len(generate_latest(ours).splitlines()) == len(generate_latest(theirs).splitlines())
