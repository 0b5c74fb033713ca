"""Answers of clients against the records that outlived a storm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from draftsmith.distill.buffer.traffic import is_whole, stitch
from draftsmith.record import RoundRecord, hashed_answer
from tests.storm.kills import (
    SERVER,
    STORE,
    WRITER,
    Answer,
    Failure,
    Log,
    Struck,
)

Records = Mapping[str, Sequence[RoundRecord]]


class Window(NamedTuple):
    """Time in which a killed writer of an engine had answers that were in no file yet, and the time
    until another one read."""

    engine: str
    begin_s: float
    kill_s: float
    end_s: float

    def has(self, answer: Answer) -> bool:
        is_apart = answer.ended_s < self.begin_s or answer.begun_s > self.end_s
        return answer.engine == self.engine and not is_apart


def windows(struck: Sequence[Struck], unflushed_s: float) -> list[Window]:
    """Windows of all kills of writers. A writer loses what it had not flushed: `unflushed_s`, and
    while the place is away all since it left."""
    absences = [
        (one.at_s - unflushed_s, (one.back_s or float("inf")) + unflushed_s)
        for one in struck
        if one.kill.what == STORE
    ]
    found = []
    for one in struck:
        if one.kill.what != WRITER:
            continue
        begin_s = one.at_s - unflushed_s
        # One absence may follow another before everything was flushed.
        for left_s, back_s in sorted(absences, reverse=True):
            if left_s < begin_s <= back_s:
                begin_s = left_s
        found.append(Window(one.kill.engine, begin_s, one.at_s, (one.back_s or float("inf")) + 0.5))
    return found


def behind(log: Log, records: Records) -> float:
    """Longest time in seconds from an answer's end to its last record: how far writers were behind
    on a machine that had other work."""
    last_s = {name: max(one.time_s for one in own) for name, own in records.items()}
    ends = ((last_s.get(hashed_answer(one.id)), one.ended_s) for one in log.answers)
    return max((made_s - ended_s for made_s, ended_s in ends if made_s is not None), default=0.0)


def texts(log: Log, records: Records, unflushed_s: float) -> dict[str, Any]:
    """Counts of answers that clients got whole: in the buffer, with the same tokens, lost where the
    design admits it and lost elsewhere; ids of the last."""
    admitted = windows(log.struck, unflushed_s)
    lost: list[Answer] = []
    changed: list[str] = []
    for answer in log.answers:
        own = records.get(hashed_answer(answer.id), [])
        text, whole = stitch(own), answer.prompt + answer.tokens
        tokens = text.tokens if text is not None else []
        if is_whole(own) and tokens == whole:
            continue
        if tokens != whole[: len(tokens)]:
            changed.append(answer.id)
        else:
            lost.append(answer)
    elsewhere = [one for one in lost if not any(window.has(one) for window in admitted)]
    ages = [
        window.kill_s - one.ended_s
        for one in lost
        for window in admitted
        if window.has(one) and one.ended_s < window.kill_s
    ]
    return {
        "answers": len(log.answers),
        "recorded": len(log.answers) - len(lost) - len(changed),
        "changed": changed,
        "lost_where_admitted": len(lost) - len(elsewhere),
        "finished_before_the_kill": len(ages),
        "oldest_lost_s": max(ages, default=0.0),
        "lost_elsewhere": [one.id for one in elsewhere],
    }


def failures(log: Log) -> dict[str, Any]:
    """Requests without a whole answer, and those among them whose engine was up all the time."""
    down = [
        (one.kill.engine, one.at_s, one.back_s or float("inf"))
        for one in log.struck
        if one.kill.what == SERVER
    ]

    def is_explained(failure: Failure) -> bool:
        return any(
            failure.engine == engine and failure.begun_s <= back_s and failure.ended_s >= at_s
            for engine, at_s, back_s in down
        )

    elsewhere = [list(one) for one in log.failed if not is_explained(one)]
    return {"failed": len(log.failed), "failed_elsewhere": elsewhere}


def versions_of(log: Log, records: Records, verified: Sequence[int]) -> dict[str, Any]:
    """Versions that engines reported or recorded, and those among them that do not verify."""
    drafted = {one.draft_version for own in records.values() for one in own if one.drafted}
    named = {int(name) for name in drafted if name}
    reported = set().union(*log.reported.values()) | named
    return {
        "reported": sorted(reported),
        "unverified": sorted(reported - set(verified)),
        "refused": {engine: sorted(found) for engine, found in sorted(log.refused.items())},
    }
