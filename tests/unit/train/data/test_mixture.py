"""Several data folders read as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.data.mixture import Mixture, provenances, read_mixture


@pytest.fixture
def read(target: Target, write_data: Callable[..., Path]) -> Callable[..., Mixture]:
    """Writes each list of rows into a folder and reads all of them, with weights."""

    def mixture(*folders: list[dict], weights: str = "::", share: float = 0.0) -> Mixture:
        paths = [write_data(rows, name=f"data{at}") for at, rows in enumerate(folders)]
        given = zip(paths, weights.split(":")) if weights != "::" else ((one, "") for one in paths)
        words = [f"{path}:{weight}" if weight else str(path) for path, weight in given]
        return read_mixture(words, target, max_length=100, held_out_share=share)

    return mixture


def row(name: str, token: int, length: int = 6, **changes: Any) -> dict:
    return {
        "name": name,
        "input_ids": [token] * length,
        "loss_mask": [0] + [1] * (length - 1),
        **changes,
    }


def rows(prefix: str, count: int, token: int, **changes: Any) -> list[dict]:
    return [row(f"{prefix}{at}", token, **changes) for at in range(count)]


def test_texts_stand_one_folder_after_the_other(read):
    mixture = read(rows("a", 3, 7), rows("b", 2, 9, length=4))
    assert [(one.folder, int(one.input_ids[0])) for one in mixture.train] == [
        *[(0, 7)] * 3,
        *[(1, 9)] * 2,
    ]
    # Every token has an index of its own.
    assert [one.token_index for one in mixture.train] == [0, 6, 12, 18, 22]
    assert mixture.train.lengths.tolist() == [6, 6, 6, 4, 4]
    assert len(provenances(mixture.provenance())) == 2
    assert [part.weight for part in mixture.train.parts] == [1.0, 1.0]


def test_weights_count_in_shares_and_vocabulary(read):
    mixture = read(rows("a", 4, 7), rows("b", 4, 9), weights="3:1")
    counts = mixture.token_counts(288)
    assert (float(counts[7]), float(counts[9])) == (60.0, 20.0)
    assert mixture.shares() == [0.75, 0.25] and mixture.tokens_per_epoch() == 96
    assert [part.weight for part in mixture.train.parts] == [3.0, 1.0]


def test_a_single_folder_is_as_before(read):
    mixture = read(rows("a", 4, 7))
    assert mixture.provenance() == mixture.corpora[0].provenance
    assert mixture.token_counts(288).dtype == torch.int64


def test_a_prompt_held_out_in_one_folder_is_trained_on_in_none(read):
    written = [row(f"p{at}", 7, split="held-out" if at < 2 else "train") for at in range(6)]
    mixture = read(written, rows("p", 6, 9), share=0.01)
    held_out, train = ({one.name for one in part} for part in (mixture.held_out, mixture.train))
    assert {"p0", "p1"} <= held_out and not held_out & train
    assert {one.folder for one in mixture.train} == {0, 1}


def test_held_out_prompts_of_all_folders_take_turns(read):
    held_out = [rows(name, 5, 7, split="held-out") for name in ("a", "b")]
    mixture = read(*([*one, row("t", 5, split="train")] for one in held_out), share=0.1)
    assert [one.folder for one in mixture.held_out.first(5)] == [0, 1, 0, 1, 0]
    assert len(mixture.held_out.first(100)) == 10


def test_folders_that_give_nothing_are_refused(read, target):
    for weights, folders in (
        ("1:0.1", [rows("a", 4, 7), rows("b", 4, 9)]),
        ("0.1", [rows("a", 5, 7)]),
    ):
        said = f"less than one of its {len(folders[-1])} texts per epoch; raise it"
        with pytest.raises(UserError, match=said):
            read(*folders, weights=weights)
    with pytest.raises(UserError, match="names no folder; give --data"):
        read_mixture((), target, max_length=100, held_out_share=0.0)


def test_a_folder_whose_prompts_are_all_held_out_elsewhere_is_refused(read):
    held_out = rows("p", 4, 7, split="held-out")
    with pytest.raises(UserError, match=r"every prompt of .*data1' is held out in another folder"):
        read([*held_out, row("t", 7, split="train")], rows("p", 4, 9), share=0.0001)
