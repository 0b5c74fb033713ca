"""`draftsmith audit`: statistical test that speculation is lossless, of this machine's kernels and
of a running server, ours or any OpenAI-compatible one that names tokens by id and sends logprobs.
Exit status 0 only when every check held and every control was caught.

Every sampled token of a server is compared with the distribution after its own prefix, however rare
that prefix is. Evidence is a product of likelihood ratios (`kernels/statistics.py`), grouped by the
depth in its round at which each token was decided (`samples.py`). In every group a bias is planted,
too, to measure the smallest one that is detected; a depth where that is not small enough, or that
no sampled text reached, leaves the audit without a verdict. The first token after a prompt comes
from the prefill, so a fault of speculation shows from the second one on. Greedy continuations must
be the argmax everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import httpx
import torch

from draftsmith.errors import UserError
from draftsmith.files import write_json
from draftsmith.progress import say
from draftsmith.serve.audit.client import AuditClient, AuditCounters
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.greedy import greedy_checks, together_checks
from draftsmith.serve.audit.kernels import audit_kernels
from draftsmith.serve.audit.reference import DistributionBook, distribution_source, reference_exists
from draftsmith.serve.audit.report import Check, Report
from draftsmith.serve.audit.samples import (
    BONUS,
    NOTHING_PLANTED,
    UNKNOWN,
    Depths,
    depth_shares,
    depths_of,
    draw_samples,
    group_name,
    make_contexts,
    paths,
    two_sample_checks,
    wanted_depths,
)
from draftsmith.serve.audit.tokens import AuditTokens, detectable, tokens_of

AuditBuffer = Callable[[AuditConfig], Report]
TOGETHER = "all tokens together"
MOST_TIMES = 30  # the most times as many samples that an audit is advised to draw


def run(config: AuditConfig, audit_buffer: AuditBuffer) -> int:
    """`audit_buffer` is called when the config names a buffer; this package cannot read records."""
    if config.device.partition(":")[0] not in ("cpu", "cuda") or (
        config.device != "cpu" and not torch.cuda.is_available()
    ):
        raise UserError(
            f"device {config.device!r} cannot be used here; give cpu, or cuda where there is a "
            "CUDA device"
        )
    reports: list[Report] = []
    if config.kernels:
        reports.append(audit_kernels(config))
    if config.url is not None:
        reports.append(audit_server(config))
    if config.buffer is not None:
        reports.append(audit_buffer(config))
    for report in reports:
        print("\n".join(report.lines()))
    if config.out:
        write_json(config.out, [report.to_dict() for report in reports])
    return 0 if all(report.verdict == "lossless" for report in reports) else 1


def audit_server(
    config: AuditConfig,
    transport: httpx.BaseTransport | None = None,
    compare_transport: httpx.BaseTransport | None = None,
) -> Report:
    client = AuditClient.connect(config, config.url or "", config.model, transport)
    plain = plain_client(config, client, compare_transport)
    known = reference_exists(config)
    # Greedy text needs no more than the likeliest token of every distribution.
    distributions = DistributionBook(
        distribution_source(
            config if known or plain is None else replace(config, temperature=0.0), plain or client
        )
    )
    client = client.reporting(config.k)
    say(f"asking {config.url} for contexts, {config.contexts} in all")
    contexts = make_contexts(client, config)
    before = client.counters()
    checks = list(greedy_checks(config, client, plain, distributions, contexts))
    checks += together_checks(config, client, distributions, contexts)
    if config.temperature > 0:
        # Drafts of greedy text are no evidence about sampled text.
        before = client.counters()
    config = replace(config, k=drafted_at_once(config, client, before))
    samples = list(draw_samples(client, config, contexts)) if config.temperature > 0 else []
    after = client.counters()
    counted = None if before is None or after is None else after.since(before)
    depths = depths_of(samples, config.k)
    if samples and known:
        distributions.fetch_along(paths(samples))
        checks += sampled_checks(
            config, tokens_of(distributions, samples, depths.flat), depths, counted
        )
    elif samples and plain is not None:
        checks += two_sample_checks(config, plain, contexts, samples, depths, counted)
    offered = (
        depths.offered
        if samples and depths.reported
        else None
        if counted is None
        else counted.draft_tokens
    )
    checks += [] if config.k == 0 and not client.controls_rounds else speculated(offered)
    remarks = notes(config, distributions, plain, depths, offered)
    remarks += [NOTHING_PLANTED] if samples and not known else []
    subject = f"{config.url} ({client.model})"
    return Report(subject, config.false_alarm, checks, remarks, greedy_only=not samples)


def notes(
    config: AuditConfig,
    distributions: DistributionBook,
    plain: AuditClient | None,
    depths: Depths,
    offered: int | None,
) -> list[str]:
    found = [
        f"{len(distributions.known)} distributions of prefixes were requested",
        _witness(config, plain),
    ]
    if depths.reported:
        found.append(f"the deepest round offered {depths.deepest} drafts, k is {config.k}")
    if offered is None:
        found.append("the server counts no draft tokens, so whether it speculated is not known")
    return found


def plain_client(
    config: AuditConfig, client: AuditClient, transport: httpx.BaseTransport | None
) -> AuditClient | None:
    """Client of a server without speculation: the server to compare with, or this one where a
    request can switch it off; None for neither."""
    if config.compare_url is None:
        return client.without_speculation()
    return AuditClient.connect(config, config.compare_url, config.compare_model, transport)


def drafted_at_once(
    config: AuditConfig, client: AuditClient, counters: AuditCounters | None
) -> int | None:
    """Depth to audit: `config.k`, else the depth that the server reports, else by its counters;
    None where nothing gives it."""
    if config.k is not None:
        return config.k
    if client.draft_depth is not None:
        return client.draft_depth
    return len(counters.accepted) if counters is not None and counters.accepted else None


def _witness(config: AuditConfig, plain: AuditClient | None) -> str:
    if config.compare_url is not None:
        return f"plain decoding and its distributions are those of {config.compare_url}"
    return (
        "the server has no switch for speculation"
        if plain is None
        else "plain decoding is this server's with speculation off"
    )


def speculated(offered: int | None) -> list[Check]:
    """Control that draft tokens were offered: answers without drafts are no evidence about
    speculation. `offered` is None where the server counts no draft tokens, as one without
    speculation does not."""
    if offered is None:
        return []
    ask = "" if offered else "no draft token was offered; start the server with a fixed --k"
    return [
        Check(
            name="control: draft tokens offered meanwhile",
            kind="control",
            passed=offered > 0,
            said=f"{offered} draft tokens were offered",
            ask=ask,
        )
    ]


def sampled_checks(
    config: AuditConfig, tokens: AuditTokens, depths: Depths, counted: AuditCounters | None
) -> list[Check]:
    """Checks of every group of tokens and of all of them; the false alarm is shared out evenly."""
    threshold = math.log((len(depths.groups) + 1) / config.false_alarm)
    checks = {
        depth: group_check(config, tokens.at(depth), group_name(depth), threshold)
        for depth in depths.groups
    }
    together = group_check(config, tokens, TOGETHER, threshold)
    unseen = [
        depth
        for depth in depths.wanted
        if checks[depth].passed and checks[depth].evidence["detectable_bias"] > config.bias
    ]
    ask = what_to_ask(config, {depth: checks[depth] for depth in unseen})
    checks |= {depth: replace(checks[depth], blind=True, ask=ask) for depth in unseen}
    found = [*checks.values(), together]
    if depths.reported or not all(check.passed for check in found):
        return found  # a broken check needs no measure of power
    return found + shared_checks(config, tokens.at(UNKNOWN), counted, threshold)


def group_check(config: AuditConfig, tokens: AuditTokens, name: str, threshold: float) -> Check:
    """Check of one group: broken where the evidence reaches `threshold`, blind where that of no
    planted bias does."""
    log_evidence = tokens.evidence()
    broken = log_evidence >= threshold
    p_value = math.exp(-max(log_evidence, 0.0))
    power = 1.0 if broken else detectable(tokens, threshold, config.seed)
    said = f"{len(tokens)} tokens, p {p_value:.2g}"
    said += (
        "" if broken else f", detects a bias of {power:.2g}" if power < 1 else ", detects no bias"
    )
    evidence = {
        "num_samples": len(tokens), "log_evidence": log_evidence, "threshold": threshold,
        "p_value": p_value,
        "detectable_bias": None if broken else power,
    }  # fmt: skip
    return Check(
        name=name,
        kind="check",
        passed=not broken,
        said=said,
        evidence=evidence,
        blind=not broken and power >= 1,
    )


def what_to_ask(config: AuditConfig, unseen: Mapping[int, Check]) -> str:
    """Advice in one sentence for all depths without enough power: more samples where `MOST_TIMES`
    as many are enough, else options that make drafts reach deeper, or a smaller k."""
    if not unseen:
        return ""
    times = {depth: times_needed(config, check) for depth, check in unseen.items()}
    rare = [depth for depth, more in times.items() if more > MOST_TIMES]
    most = max((more for more in times.values() if more <= MOST_TIMES), default=0.0)
    samples = f"--samples {math.ceil(config.samples * max(1.5, most) / 1000) * 1000}"
    if not rare:
        return f"a bias of {config.bias:g} would not be detected; give {samples}"
    warm = "lower --temperature with --top-k, so that more drafts are kept"
    # The tokens behind all of k drafts are as many as those at depth k + 1.
    k = min((config.k or 0) + 1 if depth == BONUS else depth for depth in rare) - 2
    fewer = (
        f"give a smaller --k, here --k {k}{f' and {samples}' if most else ''}, or {warm}"
        if k > 0
        else warm
    )
    return f"too few {', too few '.join(map(group_name, rare))}; {fewer}"


def times_needed(config: AuditConfig, check: Check) -> float:
    """Factor, roughly, by which more tokens would detect a bias of `config.bias`."""
    seen, count = check.evidence["detectable_bias"], check.evidence["num_samples"]
    needed = count * (seen / config.bias) ** 2 * 1.2 if seen < 1 else 20 / config.bias**2
    return needed / count if count else math.inf


def shared_checks(
    config: AuditConfig, tokens: AuditTokens, counted: AuditCounters | None, threshold: float
) -> list[Check]:
    """Controls of a server that reports no rounds: a bias at one depth is planted in as many of the
    tokens as its counters give that depth."""
    if config.k == 0:
        return []
    if counted is None or not counted.accepted:
        ask = (
            "the server reports neither how many tokens it drafts nor how many it keeps; give --k, "
            "0 if it drafts none"
        )
        given = config.k is not None
        said = "power by depth is not known" + ("" if given else ", nor k")
        return [
            Check(
                name="control: how deep the server drafts",
                kind="control",
                passed=given,
                said=said,
                ask="" if given else ask,
            )
        ]
    checks = {}
    shares = depth_shares(counted.drafts, counted.accepted, len(tokens))
    for depth in wanted_depths(config.k):
        share = shares.get(depth, 0.0)
        power = detectable(tokens, threshold, config.seed, share) if share else 1.0
        name = f"control: a bias of {config.bias:g} among {group_name(depth)}"
        said = f"{share:.1%} of the tokens after the first, " + (
            f"the smallest bias detected is {power:.2g}" if power < 1 else "no bias is detected"
        )
        evidence = {"detectable_bias": power, "num_samples": round(share * len(tokens))}
        checks[depth] = Check(
            name=name, kind="control", passed=power <= config.bias, said=said, evidence=evidence
        )
    ask = what_to_ask(config, {depth: check for depth, check in checks.items() if not check.passed})
    return [check if check.passed else replace(check, ask=ask) for check in checks.values()]
