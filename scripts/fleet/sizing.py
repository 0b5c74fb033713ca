"""Sizes of a fleet on paper: records, store and learner, each number from a formula with named
inputs. `python -m scripts.fleet.sizing` prints the table of docs/guides/fleet.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

MONTH_S = 30 * 86400.0


@dataclass(frozen=True)
class Fleet:
    """Inputs. Those of one engine are examples of a busy GPU; put in your own."""

    engines: int
    tokens_per_s: float = 2000.0  # of one engine
    tau: float = 2.0  # tokens per round
    k: int = 3  # drafted tokens per round
    record_bytes: float = 455.0  # of one drafted position on disk: docs/guides/learn.md
    record_share: float = 1.0  # of the requests that are recorded
    retention_s: float = 7 * 86400.0
    draft_bytes: float = 1e9
    kept_versions: int = 22
    poll_s: float = 10.0
    requests_a_poll: int = 3  # current, rollout.json, the engine's status
    spread_s: float = 120.0
    learner_tokens_per_s: float = 20000.0  # trained on


@dataclass(frozen=True)
class Sizes:
    """Results, by the formulas of `sizes`."""

    positions_per_s: float
    records_bytes_per_s: float
    buffer_bytes: float
    useful_share: float
    store_bytes: float
    store_requests_per_s: float
    store_requests_a_month: float
    rollout_bytes: float
    rollout_bytes_per_s: float


def sizes(fleet: Fleet) -> Sizes:
    tokens_per_s = fleet.engines * fleet.tokens_per_s
    positions_per_s = tokens_per_s / fleet.tau * fleet.k * fleet.record_share
    records_bytes_per_s = positions_per_s * fleet.record_bytes
    rollout_bytes = fleet.engines * fleet.draft_bytes
    store_requests_per_s = fleet.engines * fleet.requests_a_poll / fleet.poll_s
    return Sizes(
        positions_per_s=positions_per_s,
        records_bytes_per_s=records_bytes_per_s,
        buffer_bytes=records_bytes_per_s * fleet.retention_s,
        useful_share=min(1.0, fleet.learner_tokens_per_s / tokens_per_s),
        store_bytes=fleet.kept_versions * 2 * fleet.draft_bytes,
        store_requests_per_s=store_requests_per_s,
        store_requests_a_month=store_requests_per_s * MONTH_S,
        rollout_bytes=rollout_bytes,
        rollout_bytes_per_s=rollout_bytes / fleet.spread_s,
    )


def table() -> list[str]:
    """Rows for 1, 10 and 1,000 engines; records at a share of 1 and at what the learner uses."""
    fleets = [Fleet(engines=engines) for engines in (1, 10, 1000)]
    found = [sizes(fleet) for fleet in fleets]
    used = [
        sizes(replace(fleet, record_share=one.useful_share))
        for fleet, one in zip(fleets, found, strict=True)
    ]
    rows: list[tuple[str, str, list[str]]] = [
        (
            "positions recorded",
            "engines * tokens_per_s / tau * k * record_share",
            [f"{one.positions_per_s:,.0f} /s" for one in found],
        ),
        (
            "records",
            "positions * record_bytes",
            [f"{one.records_bytes_per_s / 1e6:,.2f} MB/s" for one in found],
        ),
        (
            "buffer",
            "records * retention_s",
            [f"{one.buffer_bytes / 1e12:,.3f} TB" for one in found],
        ),
        (
            "share that a learner can use",
            "min(1, learner_tokens_per_s / (engines * tokens_per_s))",
            [f"{one.useful_share:.3f}" for one in found],
        ),
        (
            "records at that share",
            "positions * record_bytes",
            [f"{one.records_bytes_per_s / 1e6:,.2f} MB/s" for one in used],
        ),
        (
            "versions stored",
            "kept_versions * 2 * draft_bytes",
            [f"{one.store_bytes / 1e9:,.0f} GB" for one in found],
        ),
        (
            "requests to the store",
            "engines * requests_a_poll / poll_s",
            [f"{one.store_requests_per_s:,.1f} /s" for one in found],
        ),
        (
            "the same in 30 days",
            "requests * 2,592,000 s",
            [f"{one.store_requests_a_month / 1e6:,.1f} M" for one in found],
        ),
        (
            "one version to all",
            "engines * draft_bytes",
            [f"{one.rollout_bytes / 1e9:,.0f} GB" for one in found],
        ),
        (
            "rate of that",
            "engines * draft_bytes / spread_s",
            [f"{one.rollout_bytes_per_s / 1e9:,.3f} GB/s" for one in found],
        ),
    ]
    return [
        "| size | formula | 1 engine | 10 | 1,000 |",
        "|---|---|---|---|---|",
        *(f"| {name} | `{formula}` | {' | '.join(cells)} |" for name, formula, cells in rows),
    ]


if __name__ == "__main__":
    print("\n".join(table()))
