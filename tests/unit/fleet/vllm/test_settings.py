from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from draftsmith.fleet import engine
from draftsmith.fleet.vllm.worker import Settings, settings_of


def config(**additional: object) -> SimpleNamespace:
    return SimpleNamespace(additional_config=additional)


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    engine._logged.clear()


def test_an_engine_without_settings_has_none(caplog: pytest.LogCaptureFixture) -> None:
    for one in (
        config(),
        config(other={}),
        SimpleNamespace(),
        SimpleNamespace(additional_config=None),
    ):
        assert settings_of(one) is None
    assert not caplog.records


def test_settings_are_read_from_the_engines_own_configuration() -> None:
    given = {"buffer": "s3://b", "share": 1, "mend_expand_kernel": True}
    assert settings_of(config(draftsmith=given)) == Settings(
        buffer="s3://b", share=1, mend_expand_kernel=True
    )


@pytest.mark.parametrize(
    "given",
    [
        {"bufer": "x"},
        {"buffer": {}},
        {"share": 2.0},
        {"share": True},
        {"poll_s": 0},
        {"mend_expand_kernel": "perhaps"},
        "buffer",
    ],
)
def test_wrong_settings_are_one_sentence_and_no_settings(
    given: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert settings_of(config(draftsmith=given)) is None
        assert settings_of(config(draftsmith=given)) is None
    (record,) = caplog.records
    value = given if isinstance(given, str) else next(iter(given.items()))[0]  # type: ignore[attr-defined]
    assert str(value) in record.message and "serves without draftsmith" in record.message
