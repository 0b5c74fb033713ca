"""A target that is opened where options say: here, in shares, or on a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.drafters.remote import place
from draftsmith.drafters.remote.place import load_here_or_served


def test_options_choose_the_place_and_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, tuple, dict[str, Any]]] = []

    def loader(name: str) -> Callable[..., str]:
        return lambda *given, **named: made.append((name, given, named)) or name

    monkeypatch.setattr(place, "load_remote", loader("server"))
    monkeypatch.setattr(place, "load_target", loader("here"))
    options: dict[str, Any] = {"max_length": 7, "trust_remote_code": True}
    assert (
        load_here_or_served("t", None, device="cpu", shares=2, offload="disk", **options) == "here"
    )
    url = "http://host:1"
    assert load_here_or_served("t", url, dtype="int8", device="cpu", **options) == "server"
    assert made == [
        (
            "here",
            ("t",),
            {"dtype": "auto", "device": "cpu", "shares": 2, "offload": "disk", "use": "step"}
            | options,
        ),
        (
            "server",
            ("t", url),
            {"served_as": "int8", "dtype": None, "device": torch.device("cpu")} | options,
        ),
    ]


@pytest.mark.parametrize(
    "dtype, kept, loaded",
    [
        ("auto", None, "auto"),
        ("bfloat16", None, "bfloat16"),
        ("auto", torch.bfloat16, torch.bfloat16),
        ("int8", torch.bfloat16, "int8"),
    ],
)
def test_a_target_here_is_kept_in_the_precision_of_the_machine_unless_it_is_int8(
    monkeypatch: pytest.MonkeyPatch, dtype: str, kept: torch.dtype | None, loaded: object
) -> None:
    monkeypatch.setattr(place, "load_target", lambda path, *, dtype, **rest: dtype)
    found = load_here_or_served("t", None, dtype=dtype, kept=kept, trust_remote_code=False)
    assert found == loaded
