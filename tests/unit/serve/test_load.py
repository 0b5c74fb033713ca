"""The draft that a server starts with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.options import MtpOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import sha256_of
from draftsmith.serve.config import DEFAULT_K, EngineConfig, ServeConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.load import load_drafter, load_engine
from draftsmith.serve.watch import watch_versions


@pytest.fixture
def folder(tmp_path: Path, target: Target) -> Path:
    """Three versions, of which the last is live."""
    draft = FAMILIES["mtp"].create(MtpOptions(), target, seed=0)
    for parent in (None, 1, 2):
        versions.publish(
            tmp_path, lambda folder: checkpoint.save(draft, folder, target), family="mtp",
            target={"revision": target.revision}, parent=parent, data_range={}, gate={},
        )  # fmt: skip
    return tmp_path


def tear(root: Path, version: int) -> None:
    (versions.folder_of(root, version) / "model.safetensors").write_bytes(b"torn")


def put_nan(root: Path, version: int) -> None:
    """A version that was published with a NaN."""
    weights = versions.folder_of(root, version) / "model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values())).view(-1)[0] = torch.nan
    save_file(tensors, weights)
    manifest = versions.read_manifest(root, version)
    manifest["hashes"][weights.name] = sha256_of(weights)
    versions.files.write_json(versions.folder_of(root, version) / versions.MANIFEST, manifest)


def forget_manifest(root: Path, version: int) -> None:
    (versions.folder_of(root, version) / versions.MANIFEST).write_text("[]")


def spoil_current(root: Path, version: int) -> None:
    (root / versions.CURRENT).write_text("\0\0")
    tear(root, version)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("spoil", [tear, put_nan, forget_manifest, spoil_current])
def test_a_server_starts_beside_a_spoilt_live_version(
    spoil: Callable[[Path, int], None],
    folder: Path,
    target: Target,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tear(folder, 2)
    spoil(folder, 3)
    config = ServeConfig(target="", versions=str(folder), poll_s=1e-3)
    started = load_drafter(config, target)
    assert started.version == "1" and started.number == 1
    loop = EngineLoop(build_engine(target, started.drafter, EngineConfig(), draft_version="1"))
    watcher = watch_versions(config, loop.start(), started)
    try:
        watcher.look()
    finally:
        watcher.stop()
        loop.close()
    (warning,) = warnings_of(caplog)
    assert warning.endswith("; starting with version 1")


def test_a_server_without_a_whole_version_starts_with_its_draft(
    folder: Path, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = tmp_path / "draft"
    checkpoint.save(FAMILIES["mtp"].create(MtpOptions(), target, seed=0), draft, target)
    for version in (1, 2, 3):
        tear(folder, version)
    config = ServeConfig(target="", versions=str(folder), draft=str(draft))
    started = load_drafter(config, target)
    assert started.drafter is not None and (started.version, started.number) == ("0", None)
    (warning,) = warnings_of(caplog)
    assert warning.startswith("version 3 is corrupt") and "starting with draft" in warning
    with pytest.raises(UserError, match="version 3 is corrupt"):
        load_drafter(ServeConfig(target="", versions=str(folder)), target)


def test_a_server_drafts_as_many_tokens_as_the_training(target: Target, tmp_path: Path) -> None:
    draft, learned = FAMILIES["mtp"].create(MtpOptions(), target, seed=0), tmp_path / "learned"
    trained: dict[str, Any] = {"config": {"unroll": {"steps": 2}}}

    def save(folder: Path, training: dict[str, Any]) -> None:
        checkpoint.save(draft, folder, target, training=training)

    # The live version was learned from traffic, the first is the draft as it was trained.
    for parent, training in ((None, trained), (1, {"online": {}})):
        versions.publish(
            learned, partial(save, training=training), family="mtp",
            target={"revision": target.revision}, parent=parent, data_range={}, gate={},
        )  # fmt: skip
    own, bare = tmp_path / "own", tmp_path / "bare"
    save(own, trained)
    save(bare, {})
    for config, k in (
        (ServeConfig(target="", draft=str(own)), 2),
        (ServeConfig(target="", draft=str(own), k="3"), 3),
        (ServeConfig(target="", draft=str(bare)), DEFAULT_K),
        (ServeConfig(target="", versions=str(learned)), 2),
        (ServeConfig(target="", draft=str(own), suffix=True), 2),
    ):
        engine = load_engine(replace(config, compile="off"), target).engine.config
        assert (engine.k, engine.adaptive) == (k, False), config


def test_text_alone_drafts_as_much_as_pays(target: Target) -> None:
    for k, adaptive in ((None, True), ("3", False), ("0", False)):
        config = ServeConfig(target="", compile="off", k=k, suffix=True)
        engine = load_engine(config, target).engine.config
        assert (engine.k, engine.adaptive) == (8 if k is None else int(k), adaptive)
