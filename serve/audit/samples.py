"""Sampled continuations of a few contexts, the depth in its round at which each token was decided,
and the comparison of the samples of two servers, for distributions that logprobs do not determine,
such as top-p alone.

A token's depth is one more than the drafts kept before it in its round, which is settled before the
token is drawn. So tokens of one depth have the target's distribution, each given its own prefix, if
speculation is right. (Those of one fate, drafts that were kept for example, would not.)

The tokens that followed one and the same prefix on two servers, with speculation and without, must
come from one distribution, whichever it is. They are grouped by depth. Only prefixes that occur
repeatedly count, so flat distributions leave deep tokens without power.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from draftsmith.errors import UserError
from draftsmith.kernels.statistics import Fit, chi_square_survival, homogeneity
from draftsmith.progress import Progress
from draftsmith.prompts.suites import read_suite
from draftsmith.serve.audit.client import AuditClient, AuditCompletion, AuditCounters
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.reference import Path, Text
from draftsmith.serve.audit.report import Check, fit_check

CONTEXT_TOKENS = 16
MARGIN = 1  # the bonus token of a round
UNKNOWN_K = 8  # where the server does not report how many tokens it drafts
# the first token after a prompt, and rounds without drafts; 1, 2, ... are drafted depths
UNDRAFTED = 0
BONUS = -1  # all drafts of the round were kept
UNKNOWN = -2  # the server does not report it
NAMES = {
    UNDRAFTED: "tokens without drafts",
    BONUS: "bonus tokens",
    UNKNOWN: "tokens after the first",
}
CONTROL_TEMPERATURE = 1.3
NOTHING_PLANTED = (
    f"no bias is planted at single depths: the control is one sample at {CONTROL_TEMPERATURE} "
    "times the temperature, all depths together, and the bias that each depth detects follows from "
    "its number of samples and the degrees of the test"
)
OTHER_SEEDS = 500_000_009  # the two samples must be independent
ASK = (
    "two samples without known distributions lack power at each depth; give --target, a "
    "--top-k up to 20, or a lower --temperature"
)


class Samples(NamedTuple):
    context: Text
    tokens: list[list[int]]
    reports: Sequence[dict[str, Any] | None] = ()  # of each continuation's rounds


def make_contexts(client: AuditClient, config: AuditConfig) -> list[Text]:
    """A context behind the prompt each, or, of a suite, behind chats that are spread evenly over
    it."""
    if config.suite is None:
        return [make_context(client, config, index) for index in range(config.contexts)]
    questions = read_suite(config).questions
    chosen = (questions[at * len(questions) // config.contexts] for at in range(config.contexts))
    return [
        make_context(client, config, index, client.tokens_of(question.fields))
        for index, question in enumerate(chosen)
    ]


def make_context(
    client: AuditClient, config: AuditConfig, index: int, chat: Sequence[int] = ()
) -> Text:
    """Token ids that the server generated after the prompt, twice over: a repetition lets n-gram
    drafters draft, too. Behind the ids of a chat, if one is given."""
    body = {"max_tokens": CONTEXT_TOKENS, "temperature": 1.0, "ignore_eos": True}
    prompt = list(chat) or config.prompt
    written = client.complete(prompt, **body, **_seed(config, index)).tokens
    if len(written) != CONTEXT_TOKENS:
        raise UserError(
            f"the server generated {len(written)} of {CONTEXT_TOKENS} tokens after "
            f"{config.prompt!r}; give another prompt"
        )
    return (*chat, *written, *written, *written[: CONTEXT_TOKENS // 4])


def draw_samples(
    client: AuditClient, config: AuditConfig, contexts: Sequence[Text]
) -> Iterator[Samples]:
    """Samples of `config.length` tokens and as many more as a round may draft: a round drafts no
    more tokens, and a tree has no more nodes, than are left to generate."""
    asked = (
        config.length
        + max(UNKNOWN_K if config.k is None else config.k, client.draft_tokens)
        + MARGIN
    )
    body: dict[str, Any] = {
        "max_tokens": asked,
        "temperature": config.temperature,
        "ignore_eos": True,
    }
    body |= {"top_k": config.top_k} if config.top_k else {}
    body |= {"top_p": config.top_p} if config.top_p < 1 else {}
    body |= {"min_p": config.min_p} if config.min_p else {}
    each = -(-config.samples // (len(contexts) * config.choices))
    progress = Progress("samples", total=each * len(contexts), unit="requests")
    for number, context in enumerate(contexts):
        answers: list[AuditCompletion] = []
        for begin in range(0, each, config.concurrency):
            numbers = range(begin, min(begin + config.concurrency, each))

            def ask(
                index: int, number: int = number, context: Text = context
            ) -> list[AuditCompletion]:
                # vLLM gives choice i the seed plus i: requests in a row would repeat one another's
                # choices.
                seed = _seed(config, 1_000_003 * (number + 1) + index * config.choices)
                return client.choices(list(context), n=config.choices, **body, **seed)

            answers += [choice for choices in client.map(ask, numbers) for choice in choices]
            progress.update(number * each + begin + len(numbers))
        yield Samples(
            context, [answer.tokens for answer in answers], [answer.report for answer in answers]
        )
    progress.close()


def _seed(config: AuditConfig, index: int) -> dict[str, int]:
    return {"seed": config.seed + index} if config.seeded else {}


def paths(samples: Sequence[Samples]) -> Iterator[Path]:
    for context, continuations, _ in samples:
        for tokens in continuations:
            if tokens:
                yield Path((*context, *tokens[:-1]), len(context))


def followers(
    samples: Sequence[Samples], depths: Depths | None = None, depth: int = 0
) -> dict[Text, Counter[int]]:
    """Counts of the tokens that followed each text; of `depths`, where they are given, those at
    `depth` alone."""
    found: dict[Text, Counter[int]] = {}
    for number, (context, continuations, _) in enumerate(samples):
        for index, tokens in enumerate(continuations):
            for length, token in enumerate(tokens):
                if depths is None or depths.nested[number][index][length] == depth:
                    found.setdefault((*context, *tokens[:length]), Counter())[token] += 1
    return found


def group_name(depth: int) -> str:
    return NAMES.get(depth) or f"tokens at drafted depth {depth}"


def wanted_depths(k: int | None) -> list[int]:
    """Depths of rounds of k drafts; none where k is not known."""
    return [*range(1, k + 1), BONUS] if k else []


@dataclass(frozen=True)
class Depths:
    """Depths of all sampled tokens, by context, continuation and position."""

    nested: list[list[list[int]]]
    reported: bool  # by the server
    wanted: Sequence[int] = ()  # that are to be seen, where the server reports any
    offered: int = 0  # draft tokens of all rounds
    deepest: int = 0  # the most that a round offered

    @property
    def flat(self) -> list[int]:
        return list(chain.from_iterable(chain.from_iterable(self.nested)))

    @property
    def groups(self) -> list[int]:
        found = {UNDRAFTED, *self.wanted, *self.flat}
        return sorted(found, key=lambda depth: (depth == BONUS, depth))


def depths_of(samples: Sequence[Samples], k: int | None) -> Depths:
    reports = [report for each in samples for report in each.reports]
    if not reports or any(report is None or "per_step_begin" not in report for report in reports):
        return Depths(
            [[[UNDRAFTED] + [UNKNOWN] * (len(one) - 1) for one in each.tokens] for each in samples],
            reported=False,
        )
    nested = [
        [
            reported_depths(report or {}, len(tokens), k)
            for tokens, report in zip(each.tokens, each.reports, strict=True)
        ]
        for each in samples
    ]
    offered = [
        count for report in reports if report is not None for count in report["per_step_drafted"]
    ]
    return Depths(
        nested,
        reported=True,
        wanted=wanted_depths(k),
        offered=sum(offered),
        deepest=max(offered, default=0),
    )


def reported_depths(report: dict[str, Any], count: int, k: int | None = None) -> list[int]:
    """Depth of each of an answer's `count` tokens, from the server's report of its rounds. No round
    keeps more than k drafts, though one with a draft tree offers more.

    Raises:
        UserError: a report without its rounds.
    """
    try:
        rounds = list(
            zip(
                report["per_step_begin"],
                report["per_step_drafted"],
                report["per_step_committed"],
                strict=True,
            )
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the server's report of an answer lacks its rounds ({error}); audit a server of this "
            "version"
        ) from error
    depths = [UNDRAFTED] * count
    for begin, offered, committed in rounds:
        deepest = offered if k is None else min(offered, k)
        for step in range(committed):
            if begin + step < count:
                depths[begin + step] = step + 1 if step < deepest else BONUS
    return depths


def depth_shares(drafts: int, accepted: Sequence[int], num_tokens: int) -> dict[int, float]:
    """Share of `num_tokens` tokens that were decided at each depth, by a server's counters of the
    same time: the number of rounds that drafted, and the drafts accepted at each position."""
    reached = dict(enumerate([drafts, *accepted[:-1]], 1)) | (
        {BONUS: accepted[-1]} if accepted else {}
    )
    return {depth: min(1.0, count / max(num_tokens, 1)) for depth, count in reached.items()}


def two_sample_checks(
    config: AuditConfig,
    plain: AuditClient,
    contexts: Sequence[Text],
    samples: Sequence[Samples],
    depths: Depths,
    counted: AuditCounters | None,
) -> list[Check]:
    """Checks of each depth; `counted` gives its share where the server reports no rounds."""
    others = replace(config, seed=config.seed + OTHER_SEEDS)
    without = list(draw_samples(plain, others, contexts))
    warmer = replace(
        config,
        seed=config.seed + 2 * OTHER_SEEDS,
        temperature=CONTROL_TEMPERATURE * config.temperature,
    )
    broken = list(draw_samples(plain, warmer, contexts))
    alarm = config.false_alarm / len(depths.groups)
    checks = []
    for depth in depths.groups:
        fit = same_distribution(samples, without, depths, depth)
        check = fit_check(f"{group_name(depth)}, against plain samples", "check", fit, alarm)
        # A bias at one depth alone is that much smaller among all tokens.
        share = least_share(config, depths, counted) if depth == UNKNOWN else 1.0
        small = check.evidence["detectable_bias"] <= config.bias * share
        matters = depth in depths.wanted or depth == UNKNOWN or check.blind
        blind = check.passed and not small and matters
        checks.append(replace(check, blind=blind, ask=ASK if blind else ""))
    worst = same_distribution(broken, without)
    return [
        *checks,
        fit_check(f"control: samples {CONTROL_TEMPERATURE} times as warm", "control", worst, alarm),
    ]


def least_share(config: AuditConfig, depths: Depths, counted: AuditCounters | None) -> float:
    """Share of the rarest depth among the tokens after the first; 0 where it is not known."""
    if config.k == 0:
        return 1.0
    if counted is None or not counted.accepted:
        return 0.0
    count = sum(depth == UNKNOWN for depth in depths.flat)
    shares = depth_shares(counted.drafts, counted.accepted, count)
    return min(shares.get(depth, 0.0) for depth in wanted_depths(config.k))


def same_distribution(
    ours: Sequence[Samples], theirs: Sequence[Samples], depths: Depths | None = None, depth: int = 0
) -> Fit:
    """Test of homogeneity of the tokens after each prefix, summed over prefixes; of `ours` only
    tokens at `depth` where `depths` are given."""
    first, second = followers(ours, depths, depth), followers(theirs)
    fits = []
    for text in first.keys() & second.keys():
        tokens = sorted(first[text].keys() | second[text].keys())
        counts = [
            torch.tensor([counter[token] for token in tokens])
            for counter in (first[text], second[text])
        ]
        fits.append(homogeneity(*counts))
    # In one order, whatever the order of a set: the sum of floats depends on it.
    statistic, degrees = math.fsum(fit.statistic for fit in fits), sum(fit.degrees for fit in fits)
    num_samples = sum(fit.num_samples for fit in fits if fit.degrees)
    return Fit(statistic, degrees, chi_square_survival(statistic, degrees), num_samples)
