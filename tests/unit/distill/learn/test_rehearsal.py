"""Rehearsal: texts of the data that a draft was trained on, a fixed share of every batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.distill.buffer.traffic import ServedText, is_held_out_prompt
from draftsmith.distill.config import GateConfig, LearnConfig, LearnUnroll
from draftsmith.distill.learn import learner as learning
from draftsmith.distill.learn.learner import Learner
from draftsmith.distill.learn.rehearsal import rehearsal_of
from draftsmith.distill.learn.teachers import LearningBatch, LearningRow
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from tests.data_folders import write_rows

PROMPT, ANSWER = 3, 5
ALL = GateConfig(held_out_by="request")  # holds out no prompt
MARK = 250  # second token of every text of the folders, by which a row is known


def folder_of(root: Path, name: str, count: int, first: int) -> str:
    """Data folder whose texts begin with `first`; every fourth one is held out."""
    rows = [
        {
            "name": f"{name} {number}",
            "split": "held-out" if number % 4 == 0 else "train",
            "input_ids": [first, MARK, 3 + number, *[7] * ANSWER],
            "loss_mask": [0] * PROMPT + [1] * ANSWER,
        }
        for number in range(count)
    ]
    return str(write_rows(root / name, rows))


@pytest.fixture
def served(served_texts: Callable[[int], list[ServedText]]) -> list[ServedText]:
    return served_texts(12)


def learner_of(
    target: Target, drafter: torch.nn.Module, config: LearnConfig
) -> tuple[Learner, list[Sequence[LearningRow]]]:
    """A learner, and the rows of its batches as they come."""
    rehearsal = rehearsal_of(config, target, gate=ALL, seed=0)
    learner = Learner(drafter, target, config, seed=0, rehearsal=rehearsal)
    batch, seen = learner.teacher.batch, []

    def seeing(rows: Sequence[LearningRow]) -> LearningBatch:
        seen.append(rows)
        return batch(rows)

    learner.teacher.batch = seeing
    return learner, seen


def rehearsed(rows: Sequence[LearningRow]) -> list[LearningRow]:
    return [one for one in rows if one.row.tokens[1] == MARK]


def test_a_share_of_every_batch_is_rehearsed_in_place_of_older_traffic(
    target: Target, bigram: Callable, served: list[ServedText], tmp_path: Path
) -> None:
    config = LearnConfig(
        rehearse=(folder_of(tmp_path, "code", 40, 9),), unroll=LearnUnroll(steps=1), steps=4
    )
    learner, seen = learner_of(target, bigram(288), config)
    learner.update(served[:6])
    learner.update(served[6:])
    assert len(seen) == 8 and all(len(rehearsed(rows)) == 2 for rows in seen)
    # At first there is no older traffic; afterwards two of eight are new, as without rehearsal.
    later = seen[4:]
    fresh = {tuple(text.tokens) for text in served[6:]}
    assert all(len(rows) == 8 for rows in later)
    assert all(sum(tuple(one.row.tokens) in fresh for one in rows) == 2 for rows in later)
    (row, *_) = (one.row for one in rehearsed(later[0]))
    np.testing.assert_array_equal(row.weights, [0] * PROMPT + [1] * ANSWER)


def test_what_training_holds_out_is_not_rehearsed_and_the_sample_is_the_seeds(
    target: Target, tmp_path: Path
) -> None:
    config = LearnConfig(rehearse=(folder_of(tmp_path, "code", 40, 9),), reservoir=16)
    sample = rehearsal_of(config, target, gate=ALL, seed=0)
    numbers = [row.tokens[2] - 3 for row in sample.rows]
    assert len(set(numbers)) == 16 and not any(number % 4 == 0 for number in numbers)
    assert [row.tokens for row in rehearsal_of(config, target, gate=ALL, seed=0).rows] == [
        row.tokens for row in sample.rows
    ]
    other = rehearsal_of(config, target, gate=ALL, seed=1)
    assert [row.tokens for row in other.rows] != [row.tokens for row in sample.rows]
    assert rehearsal_of(LearnConfig(), target, gate=ALL, seed=0) is None


def test_prompts_that_the_gate_holds_out_are_not_rehearsed(target: Target, tmp_path: Path) -> None:
    config = LearnConfig(rehearse=(folder_of(tmp_path, "code", 40, 9),))
    prompts = {
        share: [
            row.tokens[:PROMPT]
            for row in rehearsal_of(config, target, gate=GateConfig(held_out=share), seed=0).rows
        ]
        for share in (1e-9, 0.5)
    }
    rehearsed = [one for one in prompts[1e-9] if not is_held_out_prompt(one, 0.5)]
    assert sorted(prompts[0.5]) == sorted(rehearsed) and 0 < len(rehearsed) < len(prompts[1e-9])
    with pytest.raises(UserError, match=r"learn\.rehearse names no text"):
        rehearsal_of(config, target, gate=GateConfig(held_out=1 - 1e-9), seed=0)


def test_weights_of_folders_count(target: Target, tmp_path: Path) -> None:
    folders = folder_of(tmp_path, "code", 40, 9), folder_of(tmp_path, "prose", 40, 10)
    counts = []
    for weight in (1, 100):
        config = LearnConfig(rehearse=(folders[0], f"{folders[1]}:{weight}"), reservoir=20)
        rows = rehearsal_of(config, target, gate=ALL, seed=0).rows
        counts.append(Counter(row.tokens[0] for row in rows)[10])
    assert counts[0] < 15 < 18 <= counts[1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"teacher": "recorded"}, "learn.rehearse needs the target's pass"),
        ({"replay": 0.05}, "learn.replay 0.05, and of learn.batch 8 that is no text"),
        ({"batch": 2}, "of learn.batch 2 that is no text"),
    ],
)
def test_what_cannot_be_rehearsed_is_one_sentence(changes: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        learning.check(LearnConfig(rehearse=("DATA",), **changes))
    learning.check(LearnConfig(**changes))


@pytest.mark.parametrize(
    ("folders", "says"),
    [
        (("nowhere",), "^learn.rehearse: .*nowhere"),
        (("a", "a"), "^learn.rehearse: the option names 'a' twice"),
    ],
)
def test_a_folder_that_cannot_be_rehearsed_is_an_error_of_the_option(
    target: Target, folders: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        rehearsal_of(LearnConfig(rehearse=folders), target, gate=ALL, seed=0)
