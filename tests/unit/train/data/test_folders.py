"""Weights of data folders, and the texts of an epoch over them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.errors import UserError
from draftsmith.train.data.folders import DataFolder, FolderPart, epoch_order, folders_of, named


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ("code", [DataFolder("code")]),
        (("code:2", "a/prose:0.5"), [DataFolder("code", 2.0), DataFolder("a/prose", 0.5)]),
        (("runs:2/data",), [DataFolder("runs:2/data")]),
        (("runs:2/",), [DataFolder("runs:2/")]),
        ((":2",), [DataFolder(":2")]),
        ((), []),
        (None, []),
    ],
)
def test_a_number_behind_the_last_colon_is_the_weight(data, wanted):
    assert folders_of(data) == wanted


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (("code:0",), "gives 'code' the weight 0; it must be more than 0"),
        (("code:-1",), "weight -1"),
        (("code:inf",), "weight inf"),
        (("code:nan",), "weight nan"),
        (("code:2", "./code"), "names './code' twice"),
    ],
)
def test_wrong_weights_are_one_sentence(data, said):
    with pytest.raises(UserError, match="option 'data'") as error:
        folders_of(data)
    assert said in str(error.value)


def test_folders_are_named_without_their_weights():
    assert named(("code:2", "prose")) == "'code', 'prose'"


def order(parts: list[FolderPart], epoch: int, seed: int = 0) -> np.ndarray:
    return epoch_order(parts, np.random.default_rng([seed, epoch]), seed=seed, epoch=epoch)


PARTS = st.lists(
    st.builds(FolderPart, st.integers(1, 40), st.sampled_from([0.3, 0.5, 1.0, 1.7, 2.0])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(parts=PARTS, epochs=st.integers(1, 5), seed=st.integers(0, 3))
def test_texts_are_drawn_in_proportion_and_none_before_all_others(parts, epochs, seed):
    drawn: Counter[int] = Counter()
    for epoch in range(epochs):
        found = order(parts, epoch, seed)
        assert np.array_equal(found, order(parts, epoch, seed))
        drawn.update(found.tolist())
    start = 0
    for part in parts:
        counts = [drawn[at] for at in range(start, start + part.size)]
        # Of 13.5 texts either whole number is near enough: the product's rounding decides.
        assert abs(sum(counts) - epochs * part.size * part.weight) < 0.5 + 1e-6
        assert max(counts) - min(counts) <= 1
        start += part.size
    assert set(drawn) <= set(range(start))


def test_without_weights_the_order_is_that_of_one_folder():
    """A run from before there were weights goes on as it was."""
    expected = np.random.default_rng([3, 2]).permutation(11)
    assert np.array_equal(order([FolderPart(4), FolderPart(7)], 2, seed=3), expected)


def test_the_order_of_a_folder_is_not_that_of_an_epoch():
    parts = [FolderPart(0), FolderPart(30, 2.0)]
    in_folder = epoch_order(parts, Unshuffled(), seed=3, epoch=0)[:30]
    assert sorted(in_folder) == list(range(30))
    assert not np.array_equal(in_folder, np.random.default_rng([3, 1]).permutation(30))


class Unshuffled:
    permutation = staticmethod(np.arange)


def test_epochs_and_seeds_differ():
    parts = [FolderPart(30, 2.0), FolderPart(30, 0.5)]
    first, second, other = order(parts, 0), order(parts, 1), order(parts, 0, seed=1)
    assert not np.array_equal(first, second) and not np.array_equal(first, other)
    # The half that the first epoch left out.
    halves = [set(found[found >= 30].tolist()) for found in (first, second)]
    assert not halves[0] & halves[1] and halves[0] | halves[1] == set(range(30, 60))
