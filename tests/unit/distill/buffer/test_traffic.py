"""Stitching: the text comes back as it was served, gaps end it, roles are what verification did."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from draftsmith.distill.buffer.traffic import (
    OpenRequests,
    Role,
    branched,
    depth_of,
    is_held_out,
    stitch,
    text_row,
)
from draftsmith.record import RoundRecord
from tests.round_records import round_record


def make(
    number: int,
    position: int,
    context: list[int],
    drafted: list[int],
    committed: list[int],
    accepted: int,
) -> RoundRecord:
    return round_record(
        round=number, position=position, context=context, drafted=drafted, accepted=accepted,
        committed=committed,
    )  # fmt: skip


ROUNDS = [
    make(0, 3, [1, 2, 3], [4, 5, 9], [4, 5, 6], 2),
    make(1, 6, [], [7, 8], [7, 8, 10], 2),
    make(2, 11, [11, 12], [9, 9, 9], [13], 0),
    make(3, 12, [], [14, 15, 16], [14, 15], 3),  # cut short by a stop string
]


def test_text_and_roles() -> None:
    text = stitch(ROUNDS)
    assert text is not None and text.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15]
    c, a, r, b = Role
    assert text.roles.tolist() == [c, c, c, a, a, r, a, a, b, c, c, r, a, a]
    row = text_row(text, ("first-rejected", "later-rejected"))
    assert row.tokens == text.tokens and np.flatnonzero(row.weights).tolist() == [5, 11]


def test_texts_without_drafts_are_judged_by_a_drafts_first_token() -> None:
    plain = stitch([make(0, 3, [1, 2, 3], [], [4], 0), make(1, 4, [], [], [5], 0)])
    drafted = stitch(ROUNDS)
    assert plain is not None and drafted is not None
    assert (depth_of([plain]), depth_of([plain, drafted]), depth_of([])) == (1, 3, 1)


def test_branches_hold_the_drafted_tokens_behind_the_first_rejection() -> None:
    text = stitch(ROUNDS)
    assert text is not None
    ((record, row),) = branched(text)
    assert record == ROUNDS[2] and row.tokens == [*text.tokens[:11], 9, 9, 9]
    assert np.flatnonzero(row.weights).tolist() == [12, 13]


def test_a_missing_record_ends_the_text_and_a_missing_beginning_leaves_none() -> None:
    assert stitch([ROUNDS[0], ROUNDS[2], ROUNDS[3]]).tokens == [1, 2, 3, 4, 5, 6]
    assert stitch(ROUNDS[1:]) is None and stitch([]) is None


def test_open_requests_wait_for_silence_and_count_orphans() -> None:
    waiting = OpenRequests()
    waiting.add(ROUNDS[:2])
    assert waiting.take(idle_s=60.0) == [] and len(waiting.all_records()) == 2
    waiting.add(ROUNDS[2:3])
    (text,) = waiting.take(idle_s=0.0)
    assert len(text.records) == 3 and waiting.orphans == 0
    waiting.add(ROUNDS[3:])
    assert waiting.take(idle_s=0.0) == [] and waiting.orphans == 1


def test_held_out_is_decided_by_the_prompt() -> None:
    texts = [stitch([make(0, 3, [number, 2, 3], [4], [5], 0)]) for number in range(400)]
    share = sum(is_held_out(text, 0.25) for text in texts) / 400
    assert 0.18 < share < 0.32
    again = stitch([make(0, 3, [7, 2, 3], [8], [9], 0)])
    assert is_held_out(again, 0.25) == is_held_out(texts[7], 0.25)
    assert not any(is_held_out(text, 0.0) for text in texts)
    rollouts = [
        replace(
            text, records=[replace(one, request=str(at), context=[5, 6]) for one in text.records]
        )
        for at, text in enumerate(texts)
    ]
    assert len({is_held_out(text, 0.25) for text in rollouts}) == 1
    assert 0.18 < sum(is_held_out(text, 0.25, "request") for text in rollouts) / 400 < 0.32
