"""Round records of an observed answer.

Ids are known of accepted tokens alone: the others of a round are `UNLOGGED`, and q is never there.
Where an answer's rounds are not known, each of its tokens is a record without drafts: text to learn
from, and to score at the first depth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from draftsmith.fleet.observe.endpoints import Entry
from draftsmith.fleet.observe.sampling import ObservedSampling
from draftsmith.fleet.observe.tokens import TokenCounter
from draftsmith.record import UNLOGGED, Distribution, RoundRecord, hashed

# As servers write a logprob of minus infinity.
NO_MASS = -9999.0


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Fields that all records of an answer share."""

    answer: str  # id of the answer, as its client was given
    request_class: str = ""
    target: str = ""
    target_revision: str = ""
    draft_version: str = ""
    sampler: str = ""
    engine: str = ""
    share: float = 1.0


class ObservedStep(NamedTuple):
    """A target pass over drafted tokens."""

    begin: int  # tokens of the answer before it
    drafted: int
    accepted: int
    committed: int


def steps_of(report: Mapping[str, Any], length: int) -> list[ObservedStep] | None:
    """Drafting steps of an answer of `length` tokens; None where the report does not say where
    each one begins.

    `draftsmith serve` gives their places. vLLM does not: its first token comes from the prompt's
    pass and every further step begins where the one before ends, so that the sum of all must be
    the answer, whose last step alone may be cut. A step without drafts in between makes the sum
    fall short.
    """
    drafted, accepted = report.get("per_step_drafted"), report.get("per_step_accepted")
    if not drafted or not accepted or len(drafted) != len(accepted):
        return None
    begins, committed = report.get("per_step_begin"), report.get("per_step_committed")
    if begins is None or committed is None:
        found = _in_a_row(drafted, accepted, length)
    else:
        found = [ObservedStep(*values) for values in zip(begins, drafted, accepted, committed)]
    ends = [step.begin + step.committed for step in found]
    is_whole = bool(ends) and ends[-1] <= length
    fits = all(end <= step.begin for end, step in zip(ends, found[1:]))
    sound = all(
        0 <= step.accepted <= step.drafted and 0 < step.committed <= step.accepted + 1
        for step in found
    )
    return found if is_whole and fits and sound else None


def _in_a_row(drafted: Sequence[int], accepted: Sequence[int], length: int) -> list[ObservedStep]:
    """Empty where the steps do not add up to `length`."""
    steps, begin = [], 1
    for offered, kept in zip(drafted, accepted):
        steps.append(ObservedStep(begin, offered, kept, min(kept + 1, length - begin)))
        begin += kept + 1
    return steps if begin >= length and steps[-1].committed > 0 else []


def records_of(
    tokens: TokenCounter,
    steps: Sequence[ObservedStep] | None,
    entries: Sequence[Entry],
    sampling: ObservedSampling,
    origin: Origin,
) -> list[RoundRecord]:
    """`entries` are of all tokens of the answer, or empty."""
    text, offset = [*tokens.prompt, *tokens.answer], len(tokens.prompt)
    if steps is None:
        steps = [ObservedStep(at, 0, 0, 1) for at in range(len(tokens.answer))]
    else:
        steps = [step for step in steps if step.drafted]
    distributions = LoggedRounds(tokens.answer, entries, sampling)
    records: list[RoundRecord] = []
    recorded = 0
    for step in steps:
        position = offset + step.begin
        record = blank(origin, sampling, len(records), position, text[recorded:position])
        recorded = position + step.committed
        committed = text[position:recorded]
        kept = committed[: step.accepted]
        record.drafted = [*kept, *[UNLOGGED] * (step.drafted - len(kept))]
        record.accepted, record.committed = step.accepted, committed
        record.emitted = committed[-1] if step.committed == step.accepted + 1 else UNLOGGED
        record.draft_version = origin.draft_version if step.drafted else ""
        record.sampler = origin.sampler if step.drafted else ""
        if not sampling.adjusts:
            # Of a fully accepted draft the last token was not drafted.
            reached = min(step.committed, step.accepted + 1, max(1, step.drafted))
            record.p = [
                distributions.at(step.begin + depth, accepted=depth < step.accepted)
                for depth in range(reached)
            ]
        records.append(record)
    record = blank(origin, sampling, len(records), len(text), text[recorded:])
    record.last = True
    return [*records, record]


def blank(
    origin: Origin, sampling: ObservedSampling, number: int, position: int, context: list[int]
) -> RoundRecord:
    """Record of a round without drafts."""
    return RoundRecord(
        request=hashed(f"{origin.answer}-0"),
        round=number,
        request_class=origin.request_class,
        target=origin.target,
        target_revision=origin.target_revision,
        draft_version="",
        time_s=time.time(),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        position=position,
        context=context,
        drafted=[],
        accepted=0,
        committed=[],
        emitted=UNLOGGED,
        share=origin.share,
        seeded=sampling.seeded,
        engine=origin.engine,
    )


class LoggedRounds:
    """Distributions at the tokens of an answer. Without logprobs, and at temperatures whose
    normaliser they do not give, they hold no values: the learner computes its own."""

    def __init__(self, answer: Sequence[int], entries: Sequence[Entry], sampling: ObservedSampling):
        is_known = sampling.temperature in (0.0, 1.0)
        of_answer = [entry.token for entry in entries] == list(answer)
        self.entries = entries if is_known and of_answer else ()

    def at(self, index: int, *, accepted: bool) -> Distribution:
        if not self.entries:
            return Distribution([], [], 1.0)
        entry = self.entries[index]
        top = sorted(
            ((value, token) for token, value in entry.top.items() if value > NO_MASS), reverse=True
        )
        if top and top[-1][1] == entry.token:
            # Servers add the emitted token to the likeliest: others may lie between.
            top.pop()
        mass = sum(math.exp(value) for value, _ in top)
        return Distribution(
            [token for _, token in top],
            [value for value, _ in top],
            max(0.0, 1.0 - mass),
            drafted=entry.logprob if accepted else None,
        )
