"""The audit of a running server, ours or any OpenAI-compatible one that names tokens by id and tells logprobs.

Sampled continuations of a few contexts are held against the laws of their prefixes in two ways. Counts: the tokens that followed
one and the same prefix, for the prefixes that came up often. Transforms: numbers that are uniform exactly when every token
followed the law of its own prefix, however rare (probability-integral transforms), two positions at a time. The first token
after a prompt comes from the prefill, so a fault of speculation shows from the second one on. Greedy continuations must be the
argmax everywhere.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import httpx
import torch

from draftsmith.kernels.statistics import Fit, chi_square, chi_square_survival, g_test
from draftsmith.serve.audit_client import AuditClient
from draftsmith.serve.audit_config import AuditConfig
from draftsmith.serve.audit_greedy import greedy_checks
from draftsmith.serve.audit_law import LawBook, Text, law_source, laws_are_told
from draftsmith.serve.audit_report import Check, Report, fit_check
from draftsmith.serve.audit_samples import CONTROL_TEMPERATURE, Samples, draw_samples, followers, make_context, prefixes
from draftsmith.serve.audit_two_samples import two_sample_checks

SIDE = 8  # two positions are tested on SIDE x SIDE cells


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
    contexts = [make_context(client, config, index) for index in range(config.contexts)]
    drafted_before = client.drafted()
    checks = [*declared(client), *greedy_checks(config, client, plain, laws, contexts)]
    samples = list(draw_samples(client, config, contexts)) if config.temperature > 0 else []
    drafted_after = client.drafted()
    if samples and told:
        laws.learn(prefixes(samples))
        checks += sampled_checks(config, laws, samples)
    elif samples and plain is not None:
        checks += two_sample_checks(config, plain, contexts, samples)
    offered = None if drafted_before is None or drafted_after is None else drafted_after - drafted_before
    checks += speculated(offered)
    notes = [f"{len(laws.known)} laws of prefixes were asked for", _witness(config, plain)]
    if offered is None:
        notes.append("the server counts no draft tokens; whether it speculated is not known")
    return Report(f"{config.url} ({client.model})", config.false_alarm, checks, notes)


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
    return [Check(name="control: draft tokens offered meanwhile", kind="control", passed=offered > 0, said=f"{offered}")]


def sampled_checks(config: AuditConfig, laws: LawBook, samples: list[Samples]) -> list[Check]:
    pairs = [(place, place + 1) for place in range(1, config.length - 1)]
    alarm = config.false_alarm / (config.length + len(pairs))
    checks = [
        fit_check(f"token {place + 1} given its prefix, counts", "law", conditional_fit(laws, samples, place), alarm)
        for place in range(config.length)
    ]
    for first, second in pairs:
        fit = joint_uniformity(laws, samples, (first, second), config.seed)
        checks.append(fit_check(f"tokens {first + 1} and {second + 1}, transforms", "law", fit, alarm))
    # Either way of testing may be the one that sees a wrong law.
    wrong = (
        conditional_fit(laws, samples, 1, temperature=CONTROL_TEMPERATURE),
        joint_uniformity(laws, samples, pairs[0], config.seed, temperature=CONTROL_TEMPERATURE),
    )
    fit = min(wrong, key=lambda fit: fit.p_value)
    return [*checks, fit_check(f"control: tokens against temperature {CONTROL_TEMPERATURE}", "control", fit, alarm)]


def conditional_fit(laws: LawBook, samples: list[Samples], place: int, *, temperature: float | None = None) -> Fit:
    """Pearson's statistics of the tokens at `place`, one for each prefix before it, added up. A prefix seen too rarely to fill
    two cells adds nothing."""
    fits = []
    for text, counter in followers(samples, place).items():
        law = laws[text] if temperature is None else laws[text].tempered(temperature)
        counts = [counter[token] for token in law.ids]
        counts.append(counter.total() - sum(counts))
        fits.append(chi_square(torch.tensor(counts), torch.tensor([*law.probs, law.tail], dtype=torch.float64)))
    forbidden = any(fit.p_value == 0 and math.isinf(fit.statistic) for fit in fits)
    statistic, degrees = sum(fit.statistic for fit in fits), sum(fit.degrees for fit in fits)
    p_value = 0.0 if forbidden else chi_square_survival(statistic, degrees)
    return Fit(statistic, degrees, p_value, sum(fit.num_samples for fit in fits if fit.degrees))


def joint_uniformity(
    laws: LawBook, samples: list[Samples], pair: tuple[int, int], seed: int, *, temperature: float | None = None
) -> Fit:
    """G-test of the transforms of two positions on SIDE x SIDE cells. A token that its law forbids goes to a cell without
    mass, which gives p-value 0."""
    fractions = random.Random(seed)
    counts = torch.zeros(SIDE * SIDE + 1, dtype=torch.int64)
    for context, continuations in samples:
        for tokens in continuations:
            values = [_transform(laws, context, tokens, place, fractions, temperature) for place in pair if place < len(tokens)]
            if len(values) == 2:
                counts[_cell(values)] += 1
    probs = torch.full((SIDE * SIDE + 1,), 1 / (SIDE * SIDE), dtype=torch.float64)
    probs[-1] = 0
    return g_test(counts, probs)


def _transform(
    laws: LawBook, context: Text, tokens: list[int], place: int, fractions: random.Random, temperature: float | None
) -> float | None:
    law = laws[(*context, *tokens[:place])]
    law = law if temperature is None else law.tempered(temperature)
    return law.transform(tokens[place], fractions.random())


def _cell(values: list[float | None]) -> int:
    first, second = values
    if first is None or second is None:
        return SIDE * SIDE
    return min(int(first * SIDE), SIDE - 1) * SIDE + min(int(second * SIDE), SIDE - 1)
