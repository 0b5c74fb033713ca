"""Checks of a running server's load: blocks, queue, refusals, failures."""

from __future__ import annotations

from draftsmith.metrics_text import Scrape
from draftsmith.train.doctor.finding import Finding, fail, ok, warn

FULL = 0.95  # share of the blocks in use
OFTEN = 0.05  # preemptions per finished request, above which recomputing shows
LONG = 0.5  # of its time that a request may wait before it is admitted


def check_load(scrape: Scrape) -> list[Finding]:
    return [
        check_blocks(scrape),
        check_queue(scrape),
        check_refusals(scrape),
        check_failures(scrape),
    ]


def check_blocks(scrape: Scrape) -> Finding:
    usage, waiting = (
        scrape.total("vllm:kv_cache_usage_perc"),
        scrape.total("vllm:num_requests_waiting"),
    )
    preempted, finished = (
        scrape.total("vllm:num_preemptions_total"),
        scrape.total("vllm:request_success_total"),
    )
    what = (
        f"{usage:.0%} of the blocks in use, {waiting:.0f} waiting, {preempted:.0f} preemptions in "
        f"{finished:.0f} requests"
    )
    if preempted <= OFTEN * finished and not (usage > FULL and waiting > 0):
        return ok("load.blocks", what)
    mend = (
        "give keys and values more room (--memory-gib or --num-blocks), or admit less at a time "
        "(--max-batch, --max-length)"
    )
    return warn("load.blocks", what, mend)


def check_queue(scrape: Scrape) -> Finding:
    queue_s = scrape.total("vllm:request_queue_time_seconds_sum")
    whole_s, count = (
        scrape.total(f"vllm:e2e_request_latency_seconds_{part}") for part in ("sum", "count")
    )
    if count == 0:
        return ok("load.queue", "no request has ended yet")
    what = f"on average a request waits {queue_s / count:.2f} s of its {whole_s / count:.2f} s"
    if queue_s <= LONG * whole_s:
        return ok("load.queue", what)
    return warn(
        "load.queue", what, "raise --max-batch while blocks are free, or start another server"
    )


def check_refusals(scrape: Scrape) -> Finding:
    responses = scrape.by("draftsmith_responses_total", "status")
    full, late, asked = (
        responses.get("429", 0.0),
        responses.get("408", 0.0),
        sum(responses.values()),
    )
    what = (
        f"of {asked:.0f} requests {full:.0f} were refused because the server was full, {late:.0f} "
        "took too long"
    )
    if full == 0 and late == 0:
        return ok("load.refusals", what)
    mends = [
        "raise --max-queue or --max-concurrency if clients may wait, else start another server"
    ] * (full > 0)
    mends += ["raise --request-timeout-s or ask for fewer tokens"] * (late > 0)
    return warn("load.refusals", what, "; ".join(mends))


def check_failures(scrape: Scrape) -> Finding:
    failed = scrape.total("vllm:request_success_total", finished_reason="error")
    broken = scrape.total("draftsmith_responses_total", status="500")
    what = f"{failed:.0f} requests ended with an error, {broken:.0f} answers were 500"
    if broken == 0 and failed == 0:
        return ok("load.failures", what)
    if broken == 0:
        # In a stream the status was sent before; a format that leaves no token ends so, too, and is
        # the request's own doing.
        return warn(
            "load.failures",
            what,
            "find the requests in the server's log and in the error events of streams",
        )
    return fail(
        "load.failures",
        what,
        "read the server's log; out of memory: lower --max-round-tokens, --max-batch or "
        "--memory-gib",
    )
