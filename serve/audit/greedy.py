"""Greedy text of a server: every token the likeliest one after its prefix, and the text that plain
decoding gives; and the texts of requests of unlike length, with and without penalties, all in
flight at once: each must be the text that the server gives the same request alone.

Where two logits agree up to rounding a text may fork without any fault, so every divergence is
reported with the logprob margin between the two likeliest tokens there, and one below `margin`
counts as noise.

A server whose rotary factors, masks or padding follow the longest request of a pass answers the
short ones otherwise while a long one runs, and no request by itself shows it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from draftsmith.serve.audit.client import AuditClient
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.reference import CoarseDistribution, DistributionBook, Text
from draftsmith.serve.audit.report import Check

SHORT_TOKENS = 8
# Beyond 4,096, the length at which most models change what they rotate by; less where the server
# takes less, or reports no length.
LONG_TOKENS, UNREPORTED = 4608, 512
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5}
NONE: dict[str, float] = {}


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


class AskedTogether(NamedTuple):
    text: Text
    penalties: dict[str, float]

    @property
    def name(self) -> str:
        penalised = " with penalties" if self.penalties else ""
        return f"greedy text beside others, {len(self.text)} tokens of context{penalised}"


def together_checks(
    config: AuditConfig,
    client: AuditClient,
    distributions: DistributionBook,
    contexts: Sequence[Text],
) -> list[Check]:
    """One check per request; see the module."""
    asked = requests(config, client, contexts)
    alone = [answer(client, config, one) for one in asked]
    crowd = replace(client, concurrency=len(asked))
    beside = crowd.map(lambda one: answer(client, config, one), asked)
    return [
        same_check(config, distributions, *texts)
        for texts in zip(asked, alone, beside, strict=True)
    ]


def requests(
    config: AuditConfig, client: AuditClient, contexts: Sequence[Text]
) -> list[AskedTogether]:
    """Long ones first, so that the others run beside them."""
    context = contexts[0]
    longest = UNREPORTED if client.max_length is None else client.max_length - config.greedy_tokens
    length = max(min(longest, LONG_TOKENS), len(context))
    long = (context * (length // len(context) + 1))[:length]
    lengths = [long, context, context[:SHORT_TOKENS]]
    return [AskedTogether(text, given) for text in lengths for given in (NONE, PENALTIES)]


def answer(client: AuditClient, config: AuditConfig, asked: AskedTogether) -> list[int]:
    return client.complete(
        list(asked.text),
        max_tokens=config.greedy_tokens,
        temperature=0.0,
        ignore_eos=True,
        **asked.penalties,
    ).tokens


def same_check(
    config: AuditConfig,
    distributions: DistributionBook,
    asked: AskedTogether,
    alone: list[int],
    beside: list[int],
) -> Check:
    """Compare up to the first fork, which is noise where the two tokens are that close."""
    forks = [place for place, pair in enumerate(zip(alone, beside)) if pair[0] != pair[1]]
    if not forks:
        same = len(alone) == len(beside) == config.greedy_tokens
        said = f"{len(beside)} tokens, " + ("the same" if same else f"alone {len(alone)}")
        return Check(name=asked.name, kind="check", passed=same, said=said)
    place = forks[0]
    prefix = (*asked.text, *alone[:place])
    distributions.fetch([prefix])
    margin = distance(distributions[prefix], asked, alone, beside, place)
    said = f"forks at token {place + 1} of {len(alone)}, margin {margin:.3g}"
    evidence = {"place": place, "alone": alone[place], "beside": beside[place], "margin": margin}
    return Check(
        name=asked.name,
        kind="check",
        passed=margin <= config.margin,
        said=said,
        evidence=evidence,
    )


def distance(
    distribution: CoarseDistribution,
    asked: AskedTogether,
    alone: list[int],
    beside: list[int],
    place: int,
) -> float:
    """Difference of the two tokens' penalised logprobs; infinite where one is not listed."""
    written = Counter(alone[:place])
    values = []
    for token in (alone[place], beside[place]):
        if token not in distribution.ids:
            return math.inf
        logprob = math.log(distribution.probs[distribution.ids.index(token)] or 1e-300)
        count = written[token]
        logprob -= asked.penalties.get("presence_penalty", 0.0) * (count > 0)
        values.append(logprob - asked.penalties.get("frequency_penalty", 0.0) * count)
    return abs(values[0] - values[1])
