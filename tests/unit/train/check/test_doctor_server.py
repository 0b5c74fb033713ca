"""What /metrics of a pair in trouble looks like: each trouble is found under its name, with its
mend, and nothing else is."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from draftsmith.cli import main
from draftsmith.client import Scrape, parse
from draftsmith.errors import UserError
from draftsmith.train.check.finding import Finding
from draftsmith.train.check.server import check_metrics, read_metrics

# A pair that does well. A key is a sample's name and labels, as in the exposition; its model_name
# is left out.
SOUND: dict[str, float] = {
    "vllm:generation_tokens_total": 25000,
    "vllm:spec_decode_num_drafts_total": 9000,
    'vllm:request_success_total{finished_reason="stop"}': 150,
    'vllm:request_success_total{finished_reason="length"}': 50,
    'vllm:request_success_total{finished_reason="error"}': 0,
    "vllm:kv_cache_usage_perc": 0.4,
    "vllm:request_queue_time_seconds_sum": 10,
    "vllm:request_queue_time_seconds_count": 200,
    "draftsmith_rounds_total": 5000,
    'draftsmith_draft_version{version="7"}': 1,
    'draftsmith_reached_total{draft_version="6",position="0"}': 4000,
    'draftsmith_reached_total{draft_version="7",position="0"}': 5000,
    'draftsmith_reached_total{draft_version="7",position="1"}': 3500,
    'draftsmith_accepted_total{draft_version="6",position="0"}': 0,
    'draftsmith_accepted_total{draft_version="7",position="0"}': 3500,
    'draftsmith_accepted_total{draft_version="7",position="1"}': 2100,
    'draftsmith_drafting_rounds_total{draft_version="6"}': 4000,
    'draftsmith_drafting_rounds_total{draft_version="7"}': 5000,
    'draftsmith_committed_total{draft_version="6"}': 4000,
    'draftsmith_committed_total{draft_version="7"}': 12500,
    'draftsmith_time_seconds_total{phase="draft"}': 20,
    'draftsmith_time_seconds_total{phase="verify"}': 70,
    'draftsmith_time_seconds_total{phase="sample"}': 5,
    'draftsmith_time_seconds_total{phase="host"}': 5,
    'draftsmith_class_generation_tokens_total{request_class="a"}': 20000,
    'draftsmith_class_generation_tokens_total{request_class="b"}': 5000,
    'draftsmith_class_target_passes_total{request_class="a"}': 8000,
    'draftsmith_class_target_passes_total{request_class="b"}': 4500,
}


def exposition(samples: dict[str, float]) -> str:
    lines, told = [], set()
    for name, value in samples.items():
        bare, _, labels = name.partition("{")
        family = bare.removesuffix("_total").removesuffix("_sum").removesuffix("_count")
        kind = "counter" if bare.endswith("_total") else "histogram" if family != bare else "gauge"
        if family not in told:
            lines.append(f"# TYPE {bare if kind == 'counter' else family} {kind}")
            told.add(family)
        lines.append(f'{bare}{{model_name="m",{labels or "}"} {value}')
    return "\n".join(lines) + "\n"


def diagnose(**changes: float) -> dict[str, Finding]:
    """Findings by check; changes are given as {sample: value}."""
    return {
        finding.check: finding for finding in check_metrics(parse(exposition({**SOUND, **changes})))
    }


def test_a_pair_that_does_well_has_nothing_to_mend() -> None:
    findings = diagnose()
    assert {finding.status for finding in findings.values()} == {"ok"}
    acceptance = findings["drafting.acceptance"].what
    # Of the version that is served now; the one before it kept nothing.
    assert acceptance.startswith(
        "tau 2.50, alpha by position 0.70, 0.60; the first within [0.69, 0.71]"
    )
    # 25,000 tokens in 12,500 passes, a fifth of the time spent on drafting: 2 * 0.8.
    assert (
        "2.00 tokens per pass" in findings["drafting.payoff"].what
        and "at best 1.60 times" in findings["drafting.payoff"].what
    )


TROUBLES: dict[str, tuple[dict[str, float], str, str, str]] = {
    # what is wrong: samples, the finding, its status, part of its mend
    "acceptance under 30 %": (
        {'draftsmith_accepted_total{draft_version="7",position="0"}': 1000},
        "drafting.acceptance",
        "warn",
        "train on text like the traffic",
    ),
    "a draft that does not fit": (
        {'draftsmith_accepted_total{draft_version="7",position="0"}': 20},
        "drafting.acceptance",
        "fail",
        "draftsmith doctor T",
    ),
    "a new version": (
        {'draftsmith_drafting_rounds_total{draft_version="7"}': 30},
        "drafting.acceptance",
        "warn",
        "more traffic",
    ),
    "drafts that do not pay": (
        {'draftsmith_time_seconds_total{phase="draft"}': 120},
        "drafting.payoff",
        "warn",
        "--k auto",
    ),
    "drafts that do not pay beside k auto": (
        {'draftsmith_time_seconds_total{phase="draft"}': 120, "draftsmith_adaptive": 1},
        "drafting.payoff",
        "warn",
        "gains: a smaller draft",
    ),
    "no drafter, or one that is never asked": (
        {"vllm:spec_decode_num_drafts_total": 0},
        "drafting.used",
        "warn",
        "--draft",
    ),
}
for cause, mend in (("nan", "sound version"), ("raised", "log"), ("new", "doctor")):
    changes = {f'draftsmith_fallbacks_total{{cause="{cause}"}}': 3}
    TROUBLES[f"drafts that fail: {cause}"] = changes, f"drafting.fallbacks.{cause}", "warn", mend


@pytest.mark.parametrize("trouble", TROUBLES)
def test_each_trouble_is_found_and_nothing_else(trouble: str) -> None:
    changes, check, status, mend = TROUBLES[trouble]
    findings = diagnose(**changes)
    assert findings[check].status == status and mend in findings[check].mend
    assert {name for name, finding in findings.items() if finding.status != "ok"} == {check}


def test_a_server_without_traffic_says_so() -> None:
    findings = diagnose(**{"vllm:generation_tokens_total": 0})
    assert (
        findings["server.traffic"].status == "warn"
        and "draftsmith bench" in findings["server.traffic"].mend
    )
    assert not any(name.startswith("drafting") for name in findings)


def test_counters_are_judged_over_the_time_watched_and_gauges_as_they_are() -> None:
    before = parse(exposition(SOUND))
    new = {
        name: 2 * value if name.split("{")[0].endswith("_total") else value
        for name, value in SOUND.items()
    }
    after = parse(
        exposition(
            {**new, "vllm:kv_cache_usage_perc": 0.9, 'draftsmith_fallbacks_total{cause="nan"}': 1}
        )
    )
    between = after.since(before)
    assert between.total("vllm:generation_tokens_total") == SOUND["vllm:generation_tokens_total"]
    assert between.total("vllm:kv_cache_usage_perc") == 0.9
    assert between.by("draftsmith_fallbacks_total", "cause") == {"nan": 1}
    assert between.total("vllm:request_queue_time_seconds_sum") == 0
    with pytest.raises(UserError, match="restarted"):
        before.since(after)


def test_another_server_is_told_apart() -> None:
    answer = httpx.Response(200, text="# TYPE up gauge\nup 1\n")
    other = httpx.Client(transport=httpx.MockTransport(lambda _: answer), base_url="http://x")
    with other, pytest.raises(UserError, match="no draftsmith server"):
        read_metrics(other)


def test_what_is_no_exposition_is_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="no Prometheus text"):
        parse("<html>not found</html>\n")
    assert parse("") == Scrape({}, {})


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--url", "http://x", "--draft", "t"], "one at a time"),
        (["--url", "http://x", "--target", "t"], "one at a time"),
        ([], "give --target, or --url"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], wanted: str, capsys: Any) -> None:
    assert main(["doctor", *options]) == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://["])
def test_a_server_that_is_not_there(url: str, capsys: Any) -> None:
    assert main(["doctor", "--url", url]) == 1
    assert "fail  server.answers" in capsys.readouterr().out
