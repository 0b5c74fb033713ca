"""Drafts beside each other: those that are served, and those that only learn."""

from __future__ import annotations

from draftsmith.serve.dashboard.learning import drafts
from draftsmith.serve.requests.route import CANARY, LIVE, class_draft
from draftsmith.serve.stats import EngineStats


def test_served_drafts_come_with_their_share_and_what_they_kept_then_those_that_learn() -> None:
    stats = EngineStats()
    for draft, version, requests in (
        (LIVE, "7", 6),
        (CANARY, "8", 1),
        (class_draft("code"), "code/3", 3),
    ):
        stats.count_swap(draft, version, 0.0)
        stats.routed[draft] = requests
    stats.count_round(2, 1, 2, version="code/3")
    pool = {
        "code": {"serving": True, "gain": 0.031, "requests": 300, "updates": 12},
        "prose": {"serving": False, "gain": None, "requests": 40, "updates": 2},
        "sql": {"serving": True, "gain": None, "requests": 9, "updates": 1},
    }
    live, canary, code, prose, sql = drafts(stats, 0.1, {"updates": 20, "pool": pool})
    assert (live["draft"], live["version"], live["requests"], live["share"], live["note"]) == (
        "live",
        "7",
        6,
        0.6,
        "",
    )
    assert (live["rounds"], live["tau"], live["alpha"]) == (0, None, [])
    assert (canary["draft"], canary["version"], canary["note"]) == (
        "canary",
        "8",
        "on trial, 10 % of the requests",
    )
    assert (code["draft"], code["share"], code["tau"], code["alpha"]) == (
        "pool/code",
        0.3,
        2.0,
        [1.0, 0.0],
    )
    assert code["note"] == "gain +0.0310, 300 requests, 12 updates"
    assert (prose["draft"], prose["version"], prose["requests"]) == ("pool/prose", "", 0)
    assert (
        prose["note"] == "learns: 40 requests, 2 updates" and sql["note"] == "9 requests, 1 updates"
    )


def test_a_server_alone_has_its_live_draft_and_no_share_before_the_first_request() -> None:
    stats = EngineStats(draft_versions={LIVE: "0"})
    (live,) = drafts(stats, 0.0, None)
    assert live["draft"] == "live" and live["share"] is None
    assert [one["draft"] for one in drafts(stats, 0.0, {"pool": None})] == ["live"]
