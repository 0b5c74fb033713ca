"""Checks of a running pair from outside, by its answers over HTTP and its metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx

from draftsmith.api_key import bearer
from draftsmith.errors import UserError
from draftsmith.metrics_text import Scrape, parse
from draftsmith.train.doctor.drafting import check_drafting
from draftsmith.train.doctor.finding import Finding, fail, ok, refused, warn
from draftsmith.train.doctor.load import check_load

OURS = "draftsmith_rounds_total"
MUCH_SEEDED = 0.1  # of the tokens


def check_server(url: str, *, seconds: float = 0.0, api_key: str | None = None) -> list[Finding]:
    """All findings of the server at `url`, about the next `seconds` or, when that is 0, about all
    it has done."""
    with httpx.Client(
        base_url=url.rstrip("/").removesuffix("/v1"), headers=bearer(api_key), timeout=30
    ) as http:
        try:
            findings = [check_health(http), check_model(http)]
            scrape = read_metrics(http)
            findings += check_records(read_learner(http))
            if seconds > 0:
                time.sleep(seconds)
                scrape = read_metrics(http).since(scrape)
        except UserError as error:
            return [refused("server.metrics", error)]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            why = str(error) or type(error).__name__
            return [
                fail(
                    "server.answers",
                    f"{url} does not answer ({why})",
                    "check the URL and that draftsmith serve is running",
                )
            ]
    return findings + check_metrics(scrape)


def check_health(http: httpx.Client) -> Finding:
    status = http.get("/health").status_code
    if status == 200:
        return ok("server.health", "the engine runs")
    what = f"/health answers {status}: the engine's rounds fail or its thread has ended"
    return fail("server.health", what, "read the end of the server's log and restart it")


def check_model(http: httpx.Client) -> Finding:
    response = http.get("/v1/models")
    if response.status_code == 401:
        return warn(
            "server.model",
            "the server requires an API key",
            "give --api-key; the other checks need none",
        )
    version = http.get("/version").json()["version"]
    models = [
        f"{entry['id']} (up to {entry.get('max_model_len', '?')} tokens)"
        for entry in response.json()["data"]
    ]
    return ok("server.model", f"{', '.join(models)}, version {version}")


def read_metrics(http: httpx.Client) -> Scrape:
    response = http.get("/metrics")
    if response.status_code != 200:
        raise UserError(
            f"/metrics answers {response.status_code}; give the URL of a draftsmith server"
        )
    scrape = parse(response.text)
    if not scrape.has(OURS):
        raise UserError(
            f"/metrics has no {OURS}, so this is no draftsmith server; give the URL of one"
        )
    return scrape


def read_learner(http: httpx.Client) -> dict[str, Any]:
    """Status of the learner that the server follows; empty where it shows none."""
    response = http.get("/dashboard/data")
    if response.status_code != 200:
        return {}
    data = response.json()
    return (data.get("learner") or {}) if isinstance(data, dict) else {}


def check_records(learner: Mapping[str, Any]) -> list[Finding]:
    """Losslessness by the learner's monitor, which reads the records of all engines."""
    streams = learner.get("losslessness") or {}
    everything = streams.get("all", {})
    if not everything.get("positions"):
        return []
    alarmed = [name for name, one in streams.items() if one.get("alarm") and name != "all"]
    if alarmed or everything.get("alarm"):
        what = f"by its records not lossless: {', '.join(alarmed) or 'all together'}"
        mend = "run draftsmith audit --buffer with its buffer, which names the events"
        return [fail("learning.lossless", what, mend)]
    deviations = ", ".join(
        f"{name.removeprefix('z_')} {value:+.1f}"
        for name, value in everything.items()
        if name.startswith("z_")
    )
    what = f"{everything['positions']} recorded positions as lossless verification has them"
    return [ok("learning.lossless", f"{what}, z {deviations}")]


def check_metrics(scrape: Scrape) -> list[Finding]:
    tokens = scrape.total("vllm:generation_tokens_total")
    if tokens == 0:
        mend = "send requests, or run draftsmith bench --url with the same URL, and ask again"
        return [
            warn("server.traffic", "no token was generated in this time", mend),
            *check_load(scrape),
        ]
    finished = scrape.total("vllm:request_success_total")
    seen = ok("server.traffic", f"{finished:.0f} requests ended, {tokens:.0f} tokens generated")
    return [seen, *check_drafting(scrape), check_seeded(scrape), *check_load(scrape)]


def check_seeded(scrape: Scrape) -> Finding:
    """Share of the traffic that is not learned from; see `Request.repeatable` in serve."""
    requests, tokens = (
        scrape.total(f"draftsmith_seeded_{of}_total") for of in ("requests", "tokens")
    )
    share = tokens / scrape.total("vllm:generation_tokens_total")
    what = (
        f"{requests:.0f} requests, {share:.0%} of the tokens, were sampled with a seed: neither "
        "learned from nor measured"
    )
    if share < MUCH_SEEDED:
        return ok("learning.seeded", what)
    return warn("learning.seeded", what, "leave the seed out of requests that need not repeat")
