"""Docstrings and comments are sentences in the words of the field (scripts/prose_lint.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def lint() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose_lint", ROOT / "scripts" / "prose_lint.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_file_has_an_offence(lint: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(lint.files()) > 300
    assert lint.main([]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "source, expected",
    [
        ('"""Whether a draft fits."""', ["a docstring opens with 'Whether'"]),
        ('def f():\n    """Of a draft: how it fits."""', ["a docstring opens with 'Of'"]),
        ("x = 1  # as the server told us", ["'told'"]),
        ('"""The laws of p and q.\n\nNobody knows."""', ["'Nobody'", "'knows'", "'laws'"]),
    ],
)
def test_offences_are_found(lint: ModuleType, source: str, expected: list[str]) -> None:
    messages = [offence.message for offence in lint.offences(source)]
    assert [message.split(";")[0] for message in messages] == expected


def test_an_offence_is_printed_with_its_place(
    lint: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "one.py").write_text("x = 1  # nobody\n")
    (tmp_path / "serve" / "two.py").write_text("x = 1  # as told\n")
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    assert lint.main(["serve/two.py"]) == 1
    assert capsys.readouterr().out.startswith("serve/two.py:1: 'told'")
