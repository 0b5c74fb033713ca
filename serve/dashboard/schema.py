"""Schema of `/dashboard/data` in `/openapi.json`; `draftsmith top` and the page at `/dashboard`
both read it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Rates(BaseModel):
    rounds: int
    tau: float | None
    alpha: list[float | None]


class RoundCounts(BaseModel):
    rounds: int
    committed: int
    reached: list[int]
    accepted: list[int]


class Point(BaseModel):
    """An interval that ended at `time_s`. `plain_s`: seconds that its rounds would have taken
    without drafts, where measured."""

    time_s: float
    seconds: float
    tokens: int
    busy_s: float
    plain_s: float | None
    running: int
    waiting: int
    kv_usage: float
    draft_version: str
    drafting: RoundCounts
    classes: dict[str, RoundCounts]


class Summary(Rates):
    seconds: float
    tokens_per_s: float | None
    busy_tokens_per_s: float | None
    plain_tokens_per_s: float | None
    speedup: float | None


class Identity(BaseModel):
    model: str
    version: str
    time_s: float
    started_s: float
    lossless: bool
    drafter: str | None
    draft_version: str
    running: int
    waiting: int
    kv_usage: float
    records: int
    seeded_requests: int  # sampled with a seed: neither learned from nor measured
    seeded_share: float | None  # of all generated tokens
    swaps: int
    shows_text: bool


class PublishedVersion(BaseModel):
    version: int
    parent: int | None
    family: str
    created_s: float
    gate: dict[str, Any]
    live: bool


class DraftRow(Rates):
    """`requests` and their `share` since the server started; `version` is "" where the server has
    none."""

    draft: str
    version: str
    requests: int
    share: float | None
    note: str


class BufferSize(BaseModel):
    shards: int
    bytes: int


class DashboardBody(BaseModel):
    server: Identity
    now: Summary
    classes: dict[str, Rates]
    served: dict[str, Rates]
    contexts: dict[str, Rates]
    drafts: list[DraftRow]
    points: list[Point]
    versions: list[PublishedVersion]
    decisions: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    learner: dict[str, Any] | None
    buffer: BufferSize | None
