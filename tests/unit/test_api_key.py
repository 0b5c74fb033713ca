"""The API key of requests to a server: an option, else of the environment."""

from __future__ import annotations

import pytest

from draftsmith.api_key import VARIABLE, accepted_keys, bearer, with_key
from draftsmith.serve.bench.command import server_arguments
from draftsmith.serve.bench.config import BenchConfig


def test_an_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert bearer(None) == bearer("") == {} and accepted_keys(None) == ()
    monkeypatch.setenv(VARIABLE, "all")
    assert bearer(None) == {"authorization": "Bearer all"}
    assert bearer("one") == {"authorization": "Bearer one"}
    assert accepted_keys(None) == ("all",) and accepted_keys(["one", "two"]) == ("one", "two")
    assert with_key(None)[VARIABLE] == "all" and with_key("one")[VARIABLE] == "one"


def test_the_key_of_a_started_server_is_no_word_of_its_command() -> None:
    assert "one" not in server_arguments(BenchConfig(target="t", api_key="one"))
