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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from draftsmith.progress import Progress, say
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
    wanted: int
    margin: float  # logprob distance of the two


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
        say(f"greedy text of context {index}, {len(contexts)} in all")
        tokens = continuation(client, config, context)
        found = distributions.after([(*context, *tokens[:place]) for place in range(len(tokens))])
        known += found
        checks.append(identity_check(config, tokens, found, index))
        if plain is not None:
            name = f"greedy text against plain decoding, context {index}"
            gaps = [distribution.top_gap for distribution in found]
            other = continuation(plain, config, context)
            checks.append(fork_check(config, name, tokens, other, gaps.__getitem__, of="plain"))
    return [*checks, slip_control(config, known)]


def continuation(
    client: AuditClient, config: AuditConfig, context: Text, **penalties: float
) -> list[int]:
    options = {"max_tokens": config.greedy_tokens, "temperature": 0.0, "ignore_eos": True}
    return client.complete(list(context), **options, **penalties).tokens


def identity_check(
    config: AuditConfig, tokens: list[int], distributions: Sequence[CoarseDistribution], index: int
) -> Check:
    wrong = [
        GreedyDivergence(place, token, distribution.ids[0], distribution.top_gap)
        for place, (token, distribution) in enumerate(zip(tokens, distributions, strict=True))
        if distribution.ids[0] != token
    ]
    worst = max((found.margin for found in wrong), default=0.0)
    said = f"not the likeliest: {len(wrong)} of {len(tokens)} tokens"
    said += f", at most {apart(worst, config)}" if wrong else ""
    return Check(
        name=f"greedy identity, context {index}",
        kind="check",
        passed=worst <= config.margin and len(tokens) == config.greedy_tokens,
        said=said,
        evidence={"divergences": [found._asdict() for found in wrong]},
    )


def fork_check(
    config: AuditConfig,
    name: str,
    tokens: list[int],
    wanted: list[int],
    margin_at: Callable[[int], float],
    *,
    of: str,
) -> Check:
    """Compare token for token, up to the first fork, which is noise where the two tokens are that
    close; tokens behind it have another prefix and are no evidence. `of` names the others."""
    forks = [place for place, (ours, theirs) in enumerate(zip(tokens, wanted)) if ours != theirs]
    if not forks:
        same = len(tokens) == len(wanted)
        other = f"{len(tokens)} tokens, and {len(wanted)} when asked {of}"
        said = f"both texts are the same {len(tokens)} tokens" if same else other
        passed = same and len(tokens) == config.greedy_tokens
        return Check(name=name, kind="check", passed=passed, said=said)
    place = forks[0]
    found = GreedyDivergence(place, tokens[place], wanted[place], margin_at(place))
    return Check(
        name=name,
        kind="check",
        passed=found.margin <= config.margin,
        said=f"the texts differ from token {place + 1} of {len(tokens)} on, by two tokens "
        + apart(found.margin, config),
        evidence={"divergences": [found._asdict()]},
    )


def apart(margin: float, config: AuditConfig) -> str:
    """Distance of two tokens, and whether rounding explains that one took the other's place."""
    side = "within" if margin <= config.margin else "beyond"
    return f"{margin:.3g} apart in logprob, {side} rounding ({config.margin:g})"


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
    longest = max(len(one.text) for one in asked)
    label = f"{len(asked)} greedy texts behind up to {longest} tokens, each alone, then together"
    progress = Progress(label, 2 * len(asked), unit="answers")

    def answer(one: AskedTogether) -> list[int]:
        tokens = continuation(client, config, one.text, **one.penalties)
        progress.advance()
        return tokens

    alone = [answer(one) for one in asked]
    beside = replace(client, concurrency=len(asked)).map(answer, asked)
    progress.close()
    checks = []
    for one, theirs, ours in zip(asked, alone, beside, strict=True):
        margin = partial(distance, distributions, one, theirs, ours)
        checks.append(fork_check(config, one.name, ours, theirs, margin, of="alone"))
    return checks


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


def distance(
    distributions: DistributionBook,
    asked: AskedTogether,
    alone: list[int],
    beside: list[int],
    place: int,
) -> float:
    """Difference of the two tokens' penalised logprobs; infinite where one is not listed."""
    (distribution,) = distributions.after([(*asked.text, *alone[:place])])
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
