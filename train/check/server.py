"""Checks of a running pair from outside, by its metrics."""

from __future__ import annotations

import httpx

from draftsmith.client import Scrape, base_of, parse
from draftsmith.errors import UserError
from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.train.check.finding import Finding, fail, ok, refused, warn

OURS = "draftsmith_rounds_total"
# even a draft trained on other text keeps more than this of its first tokens; a misread one does
# not
STRANGE = 0.05
LOW = 0.30  # alpha_0 below which no drafter that reads the target's states pays
FEWEST_ROUNDS = 100  # fewer prove too little
CHECK_DRAFT = "run draftsmith doctor T --draft D"
FALLBACK_MENDS = {
    "nan": "the draft's weights give NaN: publish or load a sound version; " + CHECK_DRAFT,
    "invalid": "the draft proposes tokens that the target does not have; " + CHECK_DRAFT,
    "raised": "the server's log has the error; " + CHECK_DRAFT,
}


def check_server(url: str) -> list[Finding]:
    """All findings of the server at the URL, about all that it has done."""
    try:
        base = base_of(url)
    except UserError as error:
        return [refused("server.answers", error)]
    try:
        with httpx.Client(base_url=base, timeout=30) as http:
            findings = [check_health(http)]
            scrape = read_metrics(http)
    except UserError as error:
        return [refused("server.metrics", error)]
    except (httpx.HTTPError, ValueError) as error:
        what = f"{url} does not answer ({str(error) or type(error).__name__})"
        return [fail("server.answers", what, "check the URL and that draftsmith serve is running")]
    return findings + check_metrics(scrape)


def check_health(http: httpx.Client) -> Finding:
    status = http.get("/health").status_code
    if status == 200:
        return ok("server.health", "the engine runs")
    what = f"/health answers {status}: the engine's rounds fail or its thread has ended"
    return fail("server.health", what, "read the end of the server's log and restart it")


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


def check_metrics(scrape: Scrape) -> list[Finding]:
    tokens = scrape.total("vllm:generation_tokens_total")
    if tokens == 0:
        mend = "send requests, or run draftsmith bench --url with the same URL, and ask again"
        return [warn("server.traffic", "no token was generated in this time", mend)]
    finished = scrape.total("vllm:request_success_total")
    seen = ok("server.traffic", f"{finished:.0f} requests ended, {tokens:.0f} tokens generated")
    return [seen, *check_fallbacks(scrape), *check_drafting(scrape)]


def check_drafting(scrape: Scrape) -> list[Finding]:
    versions = scrape.by("draftsmith_draft_version", "version")
    version = next((name for name, live in versions.items() if live), "")
    rounds = scrape.total("vllm:spec_decode_num_drafts_total")
    if rounds == 0:
        what = (
            "nothing is drafted: no drafter, requests that ask for k = 0, drafts that --k auto "
            "found not to pay, or a drafter that fails"
        )
        mend = "start it with --draft or --suffix, and look at drafting.fallbacks"
        return [warn("drafting.used", what, mend)]
    seen = f"draft version {version}, {rounds:.0f} rounds with drafts, counted per request"
    return [ok("drafting.used", seen), check_acceptance(scrape, version), check_payoff(scrape)]


def check_fallbacks(scrape: Scrape) -> list[Finding]:
    """One finding per cause of rounds whose drafts were dropped."""
    causes = {
        cause: count
        for cause, count in scrape.by("draftsmith_fallbacks_total", "cause").items()
        if count > 0
    }
    if not causes:
        return [ok("drafting.fallbacks", "the drafter never failed")]
    rounds = scrape.total("draftsmith_rounds_total")
    return [
        warn(
            f"drafting.fallbacks.{cause}",
            f"{count:.0f} of {rounds:.0f} rounds lost their drafts",
            FALLBACK_MENDS.get(cause, CHECK_DRAFT),
        )
        for cause, count in causes.items()
    ]


def check_acceptance(scrape: Scrape, version: str) -> Finding:
    """alpha_i and tau of the served version, by the project's one definition."""
    reached, accepted = (
        by_position(scrape, f"draftsmith_{name}_total", draft_version=version)
        for name in ("reached", "accepted")
    )
    rounds = scrape.total("draftsmith_drafting_rounds_total", draft_version=version)
    if rounds < FEWEST_ROUNDS:
        what = f"only {rounds:.0f} rounds of draft version {version}"
        return warn("drafting.acceptance", what, "ask again after more traffic")
    counts = AcceptanceCounts(reached, accepted)
    alpha = ", ".join("-" if rate is None else f"{rate:.2f}" for rate in counts.alpha)
    first = counts.alpha_intervals[0]
    tau = scrape.total("draftsmith_committed_total", draft_version=version) / rounds
    what = (
        f"tau {tau:.2f}, alpha by position {alpha}; the first within [{first.low:.2f}, "
        f"{first.high:.2f}]"
    )
    if first.high < STRANGE:
        mend = f"taps, vocabulary or layout of this draft do not fit this target: {CHECK_DRAFT}"
        return fail("drafting.acceptance", what, mend)
    if first.high < LOW:
        mend = (
            "train on text like the traffic (draftsmith train, or serve --learn and distill), or "
            "try --suffix"
        )
        return warn("drafting.acceptance", what, mend)
    return ok("drafting.acceptance", what)


def check_payoff(scrape: Scrape) -> Finding:
    """Tokens per pass against the time that drafting takes.

    Without drafts the same tokens need so many times as many passes, none of which takes longer
    than one that also verifies drafts. So this product is the most that drafting can have gained;
    below 1 it surely costs.
    """
    time_s = scrape.by("draftsmith_time_seconds_total", "phase")
    whole_s, passes = sum(time_s.values()), scrape.total("draftsmith_class_target_passes_total")
    if whole_s == 0 or passes == 0:
        return warn("drafting.payoff", "no request has ended yet", "ask again after more traffic")
    per_pass = scrape.total("draftsmith_class_generation_tokens_total") / passes
    most = per_pass * (1 - time_s.get("draft", 0.0) / whole_s)
    split = ", ".join(f"{phase} {spent_s / whole_s:.0%}" for phase, spent_s in time_s.items())
    what = (
        f"{per_pass:.2f} tokens per pass; time of rounds: {split}; at best {most:.2f} times the "
        "speed without drafts"
    )
    if most >= 1:
        return ok("drafting.payoff", what)
    auto = "" if scrape.total("draftsmith_adaptive") else "--k auto, "
    mend = (
        f"drafting costs more than it gains: {auto}a smaller draft, or --suffix; "
        "draftsmith bench --url measures"
    )
    return warn("drafting.payoff", what, mend)


def by_position(scrape: Scrape, name: str, **labels: str) -> list[int]:
    """[K] counts."""
    counts = {
        int(position): int(count)
        for position, count in scrape.by(name, "position", **labels).items()
    }
    return [counts.get(position, 0) for position in range(max(counts, default=-1) + 1)]
