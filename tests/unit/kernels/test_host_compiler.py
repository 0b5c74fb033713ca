"""A library is compiled once, and what cannot be compiled is no error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.files import cache_folder
from draftsmith.kernels import host_compiler
from draftsmith.kernels.host_compiler import COMPILERS, compiled

SOURCE = 'extern "C" int answer() { return 40 + 2; }\n'
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE, encoding="utf-8")
    compiled.cache_clear()
    yield path
    compiled.cache_clear()


def answer(source: Path) -> int:
    compiled.cache_clear()  # as a new process
    library = compiled(source)
    assert library is not None
    return library.answer()


@needs_compiler
def test_a_source_is_compiled_once(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    host_compiler._tell.cache_clear()
    assert answer(source) == 42
    assert "compiling" in capsys.readouterr().err
    (library,) = (tmp_path / "cache" / "draftsmith").iterdir()
    assert library.suffix == ".so", "a scratch file was left"
    monkeypatch.setattr(host_compiler, "_compile", None)
    host_compiler._tell.cache_clear()
    assert answer(source) == 42
    assert capsys.readouterr().err == ""


@needs_compiler
def test_another_source_or_processor_is_another_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(source)
    source.write_text(SOURCE.replace("40", "50"), encoding="utf-8")
    assert answer(source) == 52
    monkeypatch.setattr(host_compiler, "processor", lambda: "another")
    assert answer(source) == 52
    assert len(list((tmp_path / "cache" / "draftsmith").iterdir())) == 3


@needs_compiler
def test_a_home_that_cannot_be_written_costs_nothing_but_time(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file in the way", encoding="utf-8")
    assert answer(source) == 42


@needs_compiler
def test_a_damaged_library_is_made_again(source: Path) -> None:
    digest = host_compiler._digest(source, host_compiler.compiler_path())
    library = cache_folder() / f"answer-{digest}.so"
    library.write_bytes(b"cut off")
    assert answer(source) == 42
    assert library.stat().st_size > 1000


@pytest.mark.parametrize("text, path", [(SOURCE, ""), ("not C++", None)])
def test_what_cannot_be_compiled_is_no_error(
    source: Path, monkeypatch: pytest.MonkeyPatch, text: str, path: str | None
) -> None:
    source.write_text(text, encoding="utf-8")
    if path is not None:
        monkeypatch.setenv("PATH", path)
    assert compiled(source) is None
