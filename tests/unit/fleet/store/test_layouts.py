"""Engine layouts beside a version, by the writers of `draftsmith export`."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from draftsmith.drafters import versions
from draftsmith.errors import UserError
from draftsmith.files import write_json
from draftsmith.fleet.store.mirror import LayoutWriter, Mirror
from draftsmith.fleet.store.store import VersionStore
from draftsmith.train.export import command
from draftsmith.train.export.source import ExportSource


@pytest.fixture
def root(tmp_path: Path, tiny_target: Callable[..., str]) -> Path:
    def save(folder: Path) -> None:
        AutoModelForCausalLM.from_pretrained(tiny_target("llama", seed=1)).save_pretrained(folder)
        record = {"schema": 1, "family": "draft-lm", "target": {"name": tiny_target("llama")}}
        write_json(folder / "draftsmith.json", {**record, "training": {}, "evaluation": []})

    versions.publish(
        tmp_path / "versions",
        save,
        family="draft-lm",
        target={},
        parent=None,
        data_range={},
        gate={},
    )
    return tmp_path / "versions"


def test_an_engine_fetches_the_draft_in_its_layout(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = VersionStore(f"memory://{uuid.uuid4().hex}", cache=tmp_path / "cache")
    assert Mirror(root, store, LayoutWriter(root, ["vllm"])).step()
    fetched = store.fetch(1, "vllm")
    assert AutoModelForCausalLM.from_pretrained(fetched).config.model_type == "llama"
    assert (fetched / "tokenizer.json").is_file(), "which the checkpoint lacks"
    own = versions.folder_of(root, 1)
    assert (store.fetch(1) / "model.safetensors").read_bytes() == (
        own / "model.safetensors"
    ).read_bytes()
    assert not (store.fetch(1) / "vllm").exists() and versions.open_version(root, 1) == own
    assert capsys.readouterr().out == ""


def test_a_layout_that_a_kill_left_whole_is_used_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, folder = LayoutWriter(root, ["vllm"]), versions.folder_of(root, 1)
    written = writer.write(folder)["vllm"]
    monkeypatch.setattr(writer, "_export", None)
    assert writer.write(folder) == {"vllm": written} and written.is_dir()
    writer.clear(folder)
    assert not written.exists()


def test_a_draft_without_the_layout_or_inside_its_target_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = versions.folder_of(root, 1)
    with pytest.raises(UserError, match="the speculators library does not draft with draft-lm"):
        LayoutWriter(root, ["speculators"]).write(folder)
    monkeypatch.setattr(ExportSource, "is_stitched", True)
    with pytest.raises(UserError, match="cannot be swapped while serving; publish"):
        LayoutWriter(root, ["vllm"]).write(folder)


@pytest.mark.parametrize("family", ["eagle1", "mtp"])
def test_a_layout_that_no_engine_reads_is_refused_and_another_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The speculators library reads these families, vLLM does not read them as it writes them."""
    source = SimpleNamespace(is_stitched=False, family=family)
    monkeypatch.setattr(command, "open_source", lambda config: source)
    monkeypatch.setattr(command, "run", lambda config: None)
    folder = versions.folder_of(root, 1)
    with pytest.raises(UserError, match=f"'{family}', which .*; publish it with --layouts vllm$"):
        LayoutWriter(root, ["speculators"]).write(folder)
    assert set(LayoutWriter(root, ["vllm"]).write(folder)) == {"vllm"}
    source.family = "eagle3"
    assert set(LayoutWriter(root, ["speculators"]).write(folder)) == {"speculators"}
