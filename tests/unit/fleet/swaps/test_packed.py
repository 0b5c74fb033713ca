"""Slots of a module, and what a swap cannot exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftsmith.fleet.swaps.packed import NotSwappable, check_made, check_pairs, slots_of
from tests.unit.fleet.swaps.stand_in import Draft


def test_keys_of_requests_and_the_targets_modules_are_no_slots() -> None:
    model = Draft()
    model.scale = torch.ones(2)
    assert set(slots_of(model, {id(model.embed_tokens)})) == {
        "norm", "scale", "values.weight", "lm_head.weight",
    }  # fmt: skip


@pytest.mark.parametrize("made", [3, "text", [torch.nn.Linear(1, 1)], torch.ones(1), None])
def test_plain_values_tensors_and_modules_may_be_made_by_loading(made: Any) -> None:
    model = Draft()
    before = dict(vars(model))
    model.made = made
    check_made(before, model)


@pytest.mark.parametrize("made", [object(), [object()], lambda: Draft])
def test_anything_else_is_refused(made: Any) -> None:
    model, kernel = Draft(), object()
    before = dict(vars(model))
    model.made = made if not callable(made) else lambda: kernel
    with pytest.raises(NotSwappable, match=r"Draft\.made is loaded as a"):
        check_made(before, model)


def test_another_form_after_loading_is_refused() -> None:
    served, staged = {"w": torch.ones(2, 3)}, {"w": torch.ones(3, 2)}
    with pytest.raises(NotSwappable, match="'w' is"):
        check_pairs(served, staged)
    with pytest.raises(NotSwappable, match="only the staged draft has a tensor 'v'"):
        check_pairs(served, served | {"v": torch.ones(1)})
