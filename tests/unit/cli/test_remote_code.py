"""Commands that load a model: code of the model's folder is run with `--trust-remote-code` and never
without. That every call says so is in `tests/unit/test_loaders.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.cli import main
from draftsmith.commands.table import COMMANDS, load
from draftsmith.drafters.checkpoint import save
from draftsmith.drafters.config import TRUST_HELP
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import tokenizer_record
from draftsmith.errors import UserError
from draftsmith.files import write_json
from draftsmith.serve.api import Engine
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.reference import TargetDistributions

FLAG = "--trust-remote-code"
STOP = 'raise ValueError("the code of the folder ran")'
# {own} is the folder with code of its own, {plain} one without, {draft} a draft for it, {out} a new
# folder.
LINES = {
    "generate": "generate --target {own} --prompts stdlib:code --count 1 --out {out}",
    "train": "train eagle3 --target {own} --data {data} --out {out}/draft --steps 1",
    "train from a draft": (
        "train draft-lm --target {plain} --data {data} --out {out}/draft --steps 1 draft.init={own}"
    ),
    "eval of a draft": "eval --target {plain} --draft {own} --data {data}",
    "serve": "serve --target {own} --port 0",
    "serve another vocabulary": (
        "serve --target {plain} --draft {own} --heterogeneous-vocab --port 0"
    ),
    "distill a draft": (
        "distill --target {plain} --draft {own} --buffer {out}/buffer --versions {out}/versions "
        "--device cpu"
    ),
    "export": "export {draft} --to vllm --out {out} --target {own}",
    "doctor of a draft": "doctor --target {plain} --draft {own}",
    "plan": "plan --target {own}",
}


@pytest.fixture(scope="module")
def draft(tiny_target: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, folder = Target.load(tiny_target("llama")), tmp_path_factory.mktemp("draft") / "eagle3"
    save(FAMILIES["eagle3"].create(Eagle3Options(), target, seed=0), folder, target)
    return folder


@pytest.fixture(scope="module")
def data(tiny_target: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"input_ids": list(range(3, 20)), "loss_mask": [0] * 5 + [1] * 12, "name": str(row)}
        for row in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "part-00000.parquet")
    tokenizer = Target.load(tiny_target("llama")).tokenizer()
    write_json(folder / "provenance.json", {"target": "t", **tokenizer_record(tokenizer)})
    return folder


def said(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command printed; it must have failed."""
    assert main(line.split()) in (1, 2)
    shown = capsys.readouterr()
    return shown.out + shown.err


@pytest.mark.parametrize("name", LINES)
def test_a_command_runs_no_code_of_a_folder_without_leave(
    name, own_code, draft, data, tiny_target, tmp_path, capsys
):
    own, plain, out = own_code.make(then=STOP), tiny_target("llama"), tmp_path / "out"
    line = LINES[name].format(own=own, plain=plain, draft=draft, data=data, out=out)
    shown = said(line, capsys)
    assert not own_code.has_run and not own_code.was_asked
    assert str(own) in shown and FLAG in shown
    said(f"{line} {FLAG}", capsys)
    assert own_code.has_run and not own_code.was_asked


def test_every_command_that_names_a_model_has_the_one_flag() -> None:
    for name, command in COMMANDS.items():
        fields = {field.name: field for field in dataclasses.fields(load(command.config))}
        assert ("trust_remote_code" in fields) == ("target" in fields), name
        if "target" in fields:
            assert fields["trust_remote_code"].default is False
            assert fields["trust_remote_code"].metadata["help"] == TRUST_HELP


def test_the_python_api_takes_it_too(own_code):
    folder = own_code.make(then=STOP)
    with pytest.raises(UserError, match="trust_remote_code=True in Python"):
        Engine(folder)
    assert not own_code.has_run
    with pytest.raises(UserError, match="the code of the folder ran"):
        Engine(folder, trust_remote_code=True)
    assert own_code.has_run and not own_code.was_asked


def test_the_audit_of_a_server_with_a_target_of_ones_own(own_code):
    folder = own_code.make(then=STOP)
    with pytest.raises(UserError, match=FLAG):
        TargetDistributions(AuditConfig(url="x", target=str(folder)))
    assert not own_code.has_run
    with pytest.raises(UserError, match="the code of the folder ran"):
        TargetDistributions(AuditConfig(url="x", target=str(folder), trust_remote_code=True))
    assert own_code.has_run and not own_code.was_asked
