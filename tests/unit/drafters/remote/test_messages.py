"""Bodies that hold texts and their states, and those that hold nothing of the kind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from draftsmith.drafters.remote.messages import (
    StatesOfTexts,
    Texts,
    body_of_states,
    body_of_texts,
    texts_of_body,
)
from draftsmith.errors import UserError

TEXTS = Texts(
    ids=torch.tensor([5, 6, 7, 8, 9]),
    lengths=torch.tensor([3, 2]),
    width=4,
    segments=torch.tensor([0, 0, 1, 0, 0]),
    taps=(1, 3),
    dtype="bfloat16",
)


def test_texts_arrive_as_they_were_sent() -> None:
    found = texts_of_body(body_of_texts(TEXTS))
    for name, value in vars(TEXTS).items():
        own = vars(found)[name]
        assert torch.equal(own, value) if isinstance(value, torch.Tensor) else own == value
    assert found.padded(found.ids, 0).tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]]
    assert found.num_positions == 8


def test_states_arrive_in_their_numbers() -> None:
    states = StatesOfTexts(torch.ones(5, 4).bfloat16(), torch.arange(10.0).view(5, 2))
    found = load(body_of_states(states))
    assert found.keys() == {"taps", "hidden"} and found["taps"].dtype == torch.bfloat16
    assert torch.equal(found["hidden"], states.hidden)


SETTINGS = {"format": 1, "width": 4, "taps": [1], "dtype": "float32", "apart": False, "top": 0}
IDS = {"ids": [5, 6, 7], "lengths": [3]}


@pytest.mark.parametrize(
    "settings, tensors",
    [
        ({"format": 2}, {}),
        ({"width": 2}, {}),
        ({"width": "4"}, {}),
        ({"taps": ["1"]}, {}),
        ({"taps": 1}, {}),
        ({"dtype": "int8"}, {}),
        ({"apart": 1}, {}),
        ({"top": -1}, {}),
        ({"more": 1}, {}),
        ({}, {"lengths": [2]}),
        ({}, {"lengths": [0, 3]}),
        ({}, {"lengths": []}),
        ({}, {"ids": [[5, 6, 7]]}),
        ({}, {"segments": [0, 0]}),
        ({}, {"more": [0]}),
        ({}, {"segments": [[0, 0, 0]]}),
        ({}, {"lengths": 3}),
        ({}, {"ids": [5.0, 6.0, 7.0]}),
        ({}, {"ids": [5 + 1j, 6, 7]}),
        ({}, {"ids": [True, True, True]}),
        ({}, {"ids": torch.ones(3).to(torch.float8_e4m3fn)}),
        ({"segments": [0, 0, 0]}, {}),
        ({"ids": [5, 6, 7]}, {}),
        ({"dtype": ["float32"]}, {}),
        ({"width": 4.0}, {}),
        ({"apart": True}, {"segments": [0, 0, 0]}),
    ],
)
def test_a_body_without_texts_is_refused_in_a_sentence(
    settings: dict[str, Any], tensors: dict[str, Any]
) -> None:
    values = {name: torch.as_tensor(value) for name, value in (IDS | tensors).items()}
    body = save(values, {"texts": json.dumps(SETTINGS | settings)})
    with pytest.raises(UserError, match="holds no texts of format 1"):
        texts_of_body(body)


NESTED = save({"ids": torch.ones(1)}, {"texts": "[" * 100_000})


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff" * 100, save({"ids": torch.ones(1)}), NESTED])
def test_other_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(UserError, match="holds no texts"):
        texts_of_body(body)
