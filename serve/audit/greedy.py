"""Greedy text of a server: every token the likeliest one after its prefix, and the text that plain
decoding gives.

Where two logits agree up to rounding a text may fork without any fault, so every divergence is
reported with the logprob margin between the two likeliest tokens there, and one below `margin`
counts as noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draftsmith.serve.audit.client import AuditClient
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.reference import CoarseDistribution, DistributionBook, Text
from draftsmith.serve.audit.report import Check


class GreedyDivergence(NamedTuple):
    place: int  # of the continuation
    token: int
    likeliest: int
    margin: float  # logprob distance of the two likeliest tokens there


def greedy_checks(
    config: AuditConfig,
    client: AuditClient,
    plain: AuditClient | None,
    distributions: DistributionBook,
    contexts: Sequence[Text],
) -> list[Check]:
    """`plain` answers without speculation: another server, or this one with speculation off; None
    when there is neither."""
    checks = []
    known: list[CoarseDistribution] = []
    for index, context in enumerate(contexts):
        tokens = continuation(client, config, context)
        texts = [(*context, *tokens[:place]) for place in range(len(tokens))]
        distributions.fetch(texts)
        known += [distributions[text] for text in texts]
        checks.append(
            identity_check(config, tokens, [distributions[text] for text in texts], index)
        )
        if plain is not None:
            checks.append(
                same_text_check(
                    config,
                    tokens,
                    continuation(plain, config, context),
                    distributions,
                    context,
                    index,
                )
            )
    return [*checks, slip_control(config, known)]


def continuation(client: AuditClient, config: AuditConfig, context: Text) -> list[int]:
    return client.complete(
        list(context), max_tokens=config.greedy_tokens, temperature=0.0, ignore_eos=True
    ).tokens


def identity_check(
    config: AuditConfig, tokens: list[int], distributions: Sequence[CoarseDistribution], index: int
) -> Check:
    wrong = [
        GreedyDivergence(place, token, distribution.ids[0], distribution.top_gap)
        for place, (token, distribution) in enumerate(zip(tokens, distributions, strict=True))
        if distribution.ids[0] != token
    ]
    worst = max((found.margin for found in wrong), default=0.0)
    said = f"{len(tokens)} tokens, {len(wrong)} not the argmax" + (
        f", largest margin {worst:.3g}" if wrong else ""
    )
    return Check(
        name=f"greedy identity, context {index}",
        kind="check",
        passed=worst <= config.margin and len(tokens) == config.greedy_tokens,
        said=said,
        evidence={"divergences": [found._asdict() for found in wrong]},
    )


def same_text_check(
    config: AuditConfig,
    tokens: list[int],
    plain: list[int],
    distributions: DistributionBook,
    context: Text,
    index: int,
) -> Check:
    """Compare token for token, up to the first fork; tokens behind a fork have another prefix and
    are no evidence."""
    name = f"greedy text against plain decoding, context {index}"
    forks = [place for place, (ours, theirs) in enumerate(zip(tokens, plain)) if ours != theirs]
    if not forks:
        said = (
            f"{len(tokens)} tokens, the same"
            if len(tokens) == len(plain)
            else f"{len(tokens)} tokens, plain {len(plain)}"
        )
        return Check(name=name, kind="check", passed=len(tokens) == len(plain), said=said)
    place = forks[0]
    before = (*context, *tokens[:place])
    margin = distributions[before].top_gap
    found = GreedyDivergence(place, tokens[place], plain[place], margin)
    said = f"forks at token {place + 1} of {len(tokens)}, margin {margin:.3g}"
    return Check(
        name=name,
        kind="check",
        passed=margin <= config.margin,
        said=said,
        evidence={"divergences": [found._asdict()]},
    )


def slip_control(config: AuditConfig, distributions: Sequence[CoarseDistribution]) -> Check:
    """Negative control: the second likeliest token in place of the argmax, detected wherever the
    margin is above noise. It measures the power of the greedy checks."""
    seen = sum(distribution.top_gap > config.margin for distribution in distributions)
    return Check(
        name="control: second likeliest token",
        kind="control",
        passed=seen > 0,
        said=(
            f"would be detected at {seen} of {len(distributions)} tokens, where the margin is "
            f"above {config.margin:g}"
        ),
        evidence={"seen": seen, "places": len(distributions)},
    )
