"""What a command says where its extra is missing, and that no import of an extra's package is left
out of the table."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith import cli
from draftsmith.commands import table
from draftsmith.errors import NEEDED, OPTIONAL, extra_of

ROOT = Path(__file__).resolve().parents[2]
CODE = ("src/draftsmith", "kernels", "drafters", "train", "serve", "distill", "fleet")
# The core requirements, what torch and transformers bring, and triton, which is imported behind a
# check.
CORE = {"torch", "transformers", "safetensors", "huggingface_hub", "numpy", "yaml", "tqdm", "shtab"} | {
    "tokenizers", "jinja2", "typing_extensions", "triton",
}  # fmt: skip
# Imported in a `try` that has another way.
TRIED = {"httpx2"}
# Imported inside the processes of this engine alone, which brings itself.
ENGINES = {"vllm"}
COMMANDS = {
    "generate": ["--target", "t", "--prompts", "p", "--out", "o"],
    "train": ["eagle3", "--target", "t", "--data", "d", "--out", "o"],
    "eval": ["--target", "t", "--draft", "d", "--data", "d"],
    "serve": ["--target", "t", "--suffix"],
    "distill": ["--target", "t", "--draft", "d", "--buffer", "b", "--versions", "v"],
    "bench": ["--target", "t", "--suffix"],
    "audit": ["--kernels"],
    "fleet": ["status", "--versions", "v"],
}


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name in packages else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_without_its_extra_ends_in_one_sentence_before_anything_loads(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = table.COMMANDS[name].extra
    assert extra is not None
    monkeypatch.setitem(
        table.COMMANDS, name, table.COMMANDS[name]._replace(run="draftsmith.no_such_module:run")
    )
    for package in NEEDED[extra]:
        with monkeypatch.context() as patch:
            without(patch, package)
            assert cli.main([name, *COMMANDS[name]]) == 2
        said = capsys.readouterr().err
        assert said == (
            f"draftsmith: error: {name} needs {package}, which is not installed; pip install "
            f"'draftsmith[{extra}]'\n"
        )


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("datasets", "train"),
        ("peft.tuners.lora", "train"),
        ("llguidance", "grammar"),
        ("httpx", "serve"),
    ],
)
def test_a_package_missed_on_the_way_is_one_sentence_too(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(reference: str) -> Any:
        def run(config: Any) -> int:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

        return run if reference.endswith(":run") else load.real(reference)

    load.real = table.load  # type: ignore[attr-defined]
    monkeypatch.setattr(table, "load", load)
    assert cli.main(["doctor", "--target", "t"]) == 2
    package = module.split(".")[0]
    assert capsys.readouterr().err == (
        f"draftsmith: error: doctor needs {package}, which is not installed; pip install "
        f"'draftsmith[{extra}]'\n"
    )


def test_a_module_of_ours_that_is_missing_is_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        table.COMMANDS,
        "doctor",
        table.COMMANDS["doctor"]._replace(run="draftsmith.no_such_module:run"),
    )
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main(["doctor", "--target", "t"])


def imported_packages(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def unknown_packages(source: str) -> set[str]:
    """What no extra brings, nor the core, nor Python."""
    found = imported_packages(source) - set(sys.stdlib_module_names) - CORE - TRIED - ENGINES
    return {name for name in found - {"draftsmith"} if extra_of(name) is None}


def test_every_import_is_of_the_core_or_of_a_known_extra() -> None:
    paths = [path for folder in CODE for path in (ROOT / folder).glob("**/*.py")]
    assert len(paths) > 100
    assert {
        str(path): wrong for path in paths if (wrong := unknown_packages(path.read_text()))
    } == {}
    assert unknown_packages("def f():\n    from pandas.api import types\n    import yaml") == {
        "pandas"
    }


def test_the_table_is_what_pyproject_declares() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for extra in {*NEEDED, *OPTIONAL}:
        declared = set(
            re.findall(r'"([A-Za-z0-9-]+)[>=]', re.findall(rf"(?ms)^{extra} = \[(.*?)\]$", text)[0])
        )
        known = {
            one.replace("_", "-") for one in (*NEEDED.get(extra, ()), *OPTIONAL.get(extra, ()))
        }
        # starlette and pydantic come with fastapi; httptools and uvloop are uvicorn's to find.
        assert known - {"starlette", "pydantic"} == declared - {"httptools", "uvloop"}
