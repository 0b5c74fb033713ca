"""The audit of a running server, ours or any OpenAI-compatible one that names tokens by id and tells logprobs.

Sampled tokens are held against the distribution of the token after their own prefix, however rare that prefix is: evidence is a
product of likelihood ratios (`kernels/evidence.py`), grouped by how deep in its round each token was decided
(`audit_depths.py`). In every group a bias is planted, too, to tell how small a one would be seen; a depth where that is not
small enough, or that no sampled text reached, leaves the audit without a verdict. The first token after a prompt comes from the
prefill, so a fault of speculation shows from the second one on. Greedy continuations must be the argmax everywhere.
"""

from __future__ import annotations

import math
from dataclasses import replace

import httpx

from draftsmith.serve.audit_client import AuditClient, Counters
from draftsmith.serve.audit_config import AuditConfig
from draftsmith.serve.audit_depths import BONUS, UNDRAFTED, UNKNOWN, Depths, depth_shares, depths_of, group_name, wanted_depths
from draftsmith.serve.audit_greedy import greedy_checks
from draftsmith.serve.audit_law import LawBook, law_source, laws_are_told
from draftsmith.serve.audit_report import Check, Report
from draftsmith.serve.audit_samples import draw_samples, make_context, paths
from draftsmith.serve.audit_tokens import Tokens, detectable, tokens_of
from draftsmith.serve.audit_two_samples import two_sample_checks

TOGETHER = "all tokens together"


def audit_server(
    config: AuditConfig,
    transport: httpx.BaseTransport | None = None,
    compare_transport: httpx.BaseTransport | None = None,
) -> Report:
    client = AuditClient.connect(
        config.url or "",
        model=config.model,
        api_key=config.api_key,
        timeout_s=config.timeout_s,
        concurrency=config.concurrency,
        transport=transport,
    )
    plain = plain_client(config, client, compare_transport)
    told = laws_are_told(config)
    # Greedy text needs no more than the likeliest token of every law.
    laws = LawBook(law_source(config if told or plain is None else replace(config, temperature=0.0), plain or client))
    client = client.reporting(config.k)
    contexts = [make_context(client, config, index) for index in range(config.contexts)]
    before = client.counters()
    checks = [*declared(client), *greedy_checks(config, client, plain, laws, contexts)]
    if config.temperature > 0:
        # Drafts of greedy text say nothing about what is sampled.
        before = client.counters()
    config = replace(config, k=drafted_at_once(config, client, before))
    samples = list(draw_samples(client, config, contexts)) if config.temperature > 0 else []
    counted = since(before, client.counters())
    depths = depths_of(samples)
    if samples and told:
        laws.learn_along(paths(samples))
        checks += sampled_checks(config, tokens_of(laws, samples, depths.flat), depths, counted)
    elif samples and plain is not None:
        checks += two_sample_checks(config, plain, contexts, samples, depths, counted)
    offered = depths.offered if samples and depths.told else None if counted is None else counted.draft_tokens
    checks += [] if config.k == 0 and not client.can_be_plain else speculated(offered)
    return Report(f"{config.url} ({client.model})", config.false_alarm, checks, notes(config, laws, plain, depths, offered))


def notes(config: AuditConfig, laws: LawBook, plain: AuditClient | None, depths: Depths, offered: int | None) -> list[str]:
    found = [f"{len(laws.known)} laws of prefixes were asked for", _witness(config, plain)]
    if depths.told:
        found.append(f"the deepest round offered {depths.deepest} drafts, k is {config.k}")
    if offered is None:
        found.append("the server counts no draft tokens; whether it speculated is not known")
    return found


def plain_client(config: AuditConfig, client: AuditClient, transport: httpx.BaseTransport | None) -> AuditClient | None:
    """Who answers without speculation: the server to compare with, or this one where a request can switch it off."""
    if config.compare_url is None:
        return client.without_speculation()
    return AuditClient.connect(
        config.compare_url,
        model=config.compare_model,
        api_key=config.api_key,
        timeout_s=config.timeout_s,
        concurrency=config.concurrency,
        transport=transport,
    )


def drafted_at_once(config: AuditConfig, client: AuditClient, counters: Counters | None) -> int | None:
    """The depth that is to be audited: as asked for, or what the server tells, by its counters where it has no better way."""
    if config.k is not None:
        return config.k
    if client.draft_depth is not None:
        return client.draft_depth
    return len(counters.accepted) if counters is not None and counters.accepted else None


def since(before: Counters | None, after: Counters | None) -> Counters | None:
    return None if before is None or after is None else after.since(before)


def _witness(config: AuditConfig, plain: AuditClient | None) -> str:
    if config.compare_url is not None:
        return f"plain decoding and its laws are those of {config.compare_url}"
    return "the server has no switch for speculation" if plain is None else "plain decoding is this server's with speculation off"


def declared(client: AuditClient) -> list[Check]:
    """A server that says of itself that it is lossy needs no statistics to be called so, and none could clear it."""
    said = "the server says that its answers need not have the target's law"
    return [Check(name="what the server says of itself", kind="law", passed=False, said=said)] if client.says_lossy else []


def speculated(offered: int | None) -> list[Check]:
    """Answers without drafts say nothing about speculation. `offered` is None where the server counts no draft tokens, as one
    without speculation does not."""
    if offered is None:
        return []
    ask = "" if offered else "no draft token was offered: let the server draft a fixed --k"
    return [Check(name="control: draft tokens offered meanwhile", kind="control", passed=offered > 0, said=f"{offered}", ask=ask)]


def sampled_checks(config: AuditConfig, tokens: Tokens, depths: Depths, counted: Counters | None) -> list[Check]:
    """Of every group of tokens and of all of them: the false alarm is shared out evenly."""
    wanted = wanted_depths(config.k) if depths.told else []
    groups = sorted({UNDRAFTED, *wanted, *tokens.depths.tolist()}, key=lambda depth: (depth == BONUS, depth))
    threshold = math.log((len(groups) + 1) / config.false_alarm)
    checks = [depth_check(config, tokens.at(depth), depth, threshold, wanted=depth in wanted) for depth in groups]
    checks.append(group_check(config, tokens, TOGETHER, threshold))
    if any(not check.passed for check in checks):
        return checks  # what is broken needs no measure of what would be seen
    return checks if depths.told else checks + shared_checks(config, tokens.at(UNKNOWN), counted, threshold)


def depth_check(config: AuditConfig, tokens: Tokens, depth: int, threshold: float, *, wanted: bool) -> Check:
    check = group_check(config, tokens, group_name(depth), threshold)
    if not check.passed or not wanted or check.evidence["detectable_bias"] <= config.bias:
        return check
    return replace(check, blind=True, ask=what_to_ask(config, check, len(tokens)))


def group_check(config: AuditConfig, tokens: Tokens, name: str, threshold: float) -> Check:
    """A law that is broken where the evidence reaches `threshold`, and blind where no planted bias does."""
    log_evidence = tokens.evidence()
    broken = log_evidence >= threshold
    p_value = math.exp(-max(log_evidence, 0.0))
    power = 1.0 if broken else detectable(tokens, threshold, config.seed)
    said = f"{len(tokens)} tokens, p {p_value:.2g}"
    said += "" if broken else f", would see a bias of {power:.2g}" if power < 1 else ", would see no bias"
    evidence = {
        "num_samples": len(tokens), "log_evidence": log_evidence, "threshold": threshold, "p_value": p_value,
        "detectable_bias": None if broken else power,
    }  # fmt: skip
    return Check(name=name, kind="law", passed=not broken, said=said, evidence=evidence, blind=not broken and power >= 1)


def what_to_ask(config: AuditConfig, check: Check, count: int) -> str:
    """One sentence: more samples where that is within reach, else what makes drafts reach deeper."""
    seen = check.evidence["detectable_bias"]
    needed = count * (seen / config.bias) ** 2 * 1.2 if seen < 1 else 20 / config.bias**2
    times = needed / max(count, 1)
    if count == 0 or times > 30:
        return (
            f"{check.name}: {count} are too few; lower --temperature with --top-k, so that more drafts are kept, or audit a "
            f"smaller --k"
        )
    samples = math.ceil(config.samples * max(times, 1.5) / 1000) * 1000
    return f"{check.name}: a bias of {config.bias:g} would not be seen; give --samples {samples}"


def shared_checks(config: AuditConfig, tokens: Tokens, counted: Counters | None, threshold: float) -> list[Check]:
    """Where the server tells no rounds, a bias at one depth is planted in as many of the tokens as its counters give that
    depth."""
    if config.k == 0:
        return []
    if counted is None or not counted.accepted:
        ask = "the server tells neither how many tokens it drafts nor how many it keeps; give --k, 0 if it drafts none"
        known = config.k is not None
        said = "power by depth is not known" + ("" if known else ", nor k")
        return [
            Check(name="control: how deep the server drafts", kind="control", passed=known, said=said, ask="" if known else ask)
        ]
    checks = []
    shares = depth_shares(counted.drafts, counted.accepted, len(tokens))
    for depth in wanted_depths(config.k):
        share = shares.get(depth, 0.0)
        power = detectable(tokens, threshold, config.seed, share) if share else 1.0
        name = f"control: a bias of {config.bias:g} among {group_name(depth)}"
        said = f"{share:.1%} of the tokens after the first, " + (
            f"the smallest one seen is {power:.2g}" if power < 1 else "none was seen"
        )
        count = round(share * len(tokens))
        evidence = {"detectable_bias": power, "num_samples": count}
        check = Check(name=name, kind="control", passed=power <= config.bias, said=said, evidence=evidence)
        checks.append(check if check.passed else replace(check, ask=what_to_ask(config, check, count)))
    return checks
