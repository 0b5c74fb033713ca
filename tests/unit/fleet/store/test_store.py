"""Store of versions as an engine reads it: what is verified, refused, kept and waited for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.fleet.store import store as store_module
from draftsmith.fleet.store.layout import EngineStatus, StoreError, StoreUnreachable, parse_current
from draftsmith.fleet.store.store import KEPT, VersionStore

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 1000, "vllm/model.safetensors": b"v" * 9}


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> VersionStore:
    url = str(tmp_path / "store") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"
    return VersionStore(url, cache=tmp_path / "cache", sleep=lambda wait_s: None)


def publish(store: VersionStore, version: int, tmp_path: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        store.upload(path, f"v{version:06d}/{name}")
    store.put_manifest(version, manifest_of(version, files))


def manifest_of(version: int, files: dict[str, bytes]) -> bytes:
    marks = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }
    return json.dumps(
        {"schema": 1, "version": version, "layouts": ["vllm"], "files": marks}
    ).encode()


def test_a_version_is_fetched_whole_in_the_layout_that_is_named(
    store: VersionStore, tmp_path: Path
) -> None:
    assert store.current() is None and store.engines() == []
    publish(store, 7, tmp_path, FILES)
    store.put_current(7)
    assert store.current() == 7 and store.versions() == [7]
    assert [path.name for path in store.fetch(7, "vllm").iterdir()] == ["model.safetensors"]
    assert (store.fetch(7, "vllm") / "model.safetensors").read_bytes() == b"v" * 9
    checkpoint = store.fetch(7)
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    with pytest.raises(StoreError, match=r"no layout 'sglang' .it has vllm.; publish it with"):
        store.fetch(7, "sglang")


LEARNERS = b'{"schema": 1, "version": 7, "hashes": {"config.json": "0"}}'


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("vllm/model.safetensors", b"v" * 4, "has 4 bytes instead of 9"),
        ("vllm/model.safetensors", b"x" * 9, "is not what was published"),
        ("vllm/model.safetensors", None, "'model.safetensors' is missing"),
        ("manifest.json", None, "is not in .* or only a part of it"),
        ("manifest.json", b'{"schema": 1', "is not valid JSON"),
        ("manifest.json", manifest_of(6, FILES), "is of version 6"),
        ("manifest.json", manifest_of(7, {}), "lists no files"),
        ("manifest.json", LEARNERS, "lists no files; publish it again"),
        ("manifest.json", manifest_of(7, {"../x": b""}), "lies outside its folder"),
        ("manifest.json", manifest_of(7, {"vllm//x": b""}), "lies outside its folder"),
        ("manifest.json", b'{"schema":1,"version":7,"files":{"a":3}}', "in another form"),
    ],
)
def test_a_torn_or_overwritten_version_is_refused_in_a_sentence(
    store: VersionStore, tmp_path: Path, name: str, data: bytes | None, sentence: str
) -> None:
    publish(store, 7, tmp_path, FILES)
    if data is None:
        store.delete(f"v000007/{name}")
    else:
        store.put(f"v000007/{name}", data)
    with pytest.raises(StoreError, match=sentence) as refused:
        store.fetch(7, "vllm")
    assert not isinstance(refused.value, StoreUnreachable)
    assert list(store.copies.glob("*")) + list(store.copies.glob(".v*")) == []


def test_a_damaged_copy_is_fetched_again_and_a_new_version_7_is_not_the_old_one(
    store: VersionStore, tmp_path: Path
) -> None:
    publish(store, 7, tmp_path, FILES)
    copy = store.fetch(7, "vllm") / "model.safetensors"
    copy.write_bytes(b"x" * 9)
    assert (store.fetch(7, "vllm") / copy.name).read_bytes() == b"v" * 9
    (copy.parent / "extra").write_bytes(b"")
    store.fetch(7, "vllm")
    assert not (copy.parent / "extra").exists()
    publish(store, 7, tmp_path, {**FILES, "vllm/model.safetensors": b"new"})
    assert (store.fetch(7, "vllm") / copy.name).read_bytes() == b"new"


def test_the_latest_two_copies_stay_and_the_served_one(store: VersionStore, tmp_path: Path) -> None:
    for version in (1, 2, 3, 4):
        publish(store, version, tmp_path, FILES)
        store.fetch(version, "vllm", held=[1])
    kept = sorted(path.name for path in store.copies.iterdir())
    assert kept == ["v000001-vllm", "v000004-vllm"]
    store.fetch(3, "vllm")
    assert len(list(store.copies.iterdir())) == KEPT == 2


def test_leftovers_of_killed_downloads_go_once_they_are_old(
    store: VersionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 7, tmp_path, FILES)
    torn = store.copies / ".v000006-vllm.01234567.tmp"
    torn.mkdir(parents=True)
    store.fetch(7)
    assert torn.exists(), "another process may be writing it"
    monkeypatch.setattr(store_module, "LEFTOVER_AGE_S", -1.0)
    store.fetch(7, "vllm")
    assert not torn.exists()


def test_a_cut_download_is_tried_once_more(
    store: VersionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 7, tmp_path, FILES)
    whole, calls = store.download, []

    def cut(name: str, path: Path) -> None:
        calls.append(name)
        whole(name, path)
        if len(calls) == 1:
            path.write_bytes(path.read_bytes()[:3])

    monkeypatch.setattr(store, "download", cut)
    assert (store.fetch(7, "vllm") / "model.safetensors").read_bytes() == b"v" * 9
    assert len(calls) == 2


def test_an_unreachable_store_is_tried_a_bounded_number_of_times(
    store: VersionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 7, tmp_path, FILES)
    store.put_current(7)
    waits: list[float] = []
    store.sleep = waits.append
    answers: list[Callable[[], bytes]] = []

    def cat_file(path: str) -> bytes:
        return answers.pop(0)()

    def fails() -> bytes:
        raise RuntimeError("503 slow down\nof the store")

    monkeypatch.setattr(store, "fs", type("Fs", (), {"cat_file": staticmethod(cat_file)}))
    answers += [fails, fails, lambda: b"7\n"]
    assert store.current() == 7 and len(waits) == 2 and 0.1 <= waits[0] <= 0.3 <= waits[1] * 1.5
    answers += [fails] * 3
    with pytest.raises(StoreUnreachable, match=r"RuntimeError: 503 slow down\); what is served"):
        store.current()
    assert answers == []


def test_a_torn_current_is_no_version() -> None:
    assert parse_current(b"12\n") == 12
    for torn in (b"", b"1", b"12", b"-1\n", b"twelve\n", b"1\x00\n"):
        with pytest.raises(StoreError, match="instead of a version number"):
            parse_current(torn)


def test_only_a_whole_version_becomes_current(store: VersionStore, tmp_path: Path) -> None:
    store.put("v000008/config.json", b"{}")
    with pytest.raises(StoreError, match="only a part of it"):
        store.put_current(8)
    with pytest.raises(StoreError, match="lists no files"):
        store.put_manifest(8, manifest_of(8, {}))
    assert store.current() is None


def test_statuses_of_engines_are_read_back_and_broken_ones_left_out(store: VersionStore) -> None:
    one = EngineStatus(
        engine="host/a:8000",
        version=7,
        alpha=0.25,
        z=float("nan"),
        refused={8: "torn"},
        last_swap={"version": 7, "pause_ms": 3.0, "ok": True},
        at_s=5.0,
    )
    store.put_engine(one)
    store.put_engine(EngineStatus(engine="b"))
    store.put("engines/broken.json", b'{"engine": "c", "refused": {"x": 1}}')
    store.put("engines/newer.json", b'{"engine": "d", "later": 1, "version": 3}')
    b, d, host = store.engines()
    assert (b.engine, d.engine, d.version) == ("b", "d", 3)
    assert host == dataclasses.replace(one, z=None)


def test_reading_loads_neither_torch_nor_the_rest_of_draftsmith() -> None:
    code = """
import sys
from draftsmith.fleet.store.store import VersionStore
store = VersionStore(sys.argv[1])
store.current(), store.engines()
ours = [name for name in sys.modules if name.startswith("draftsmith.")]
base = ("draftsmith.version", "draftsmith.train")  # loaded by the package itself
base += ("draftsmith.files", "draftsmith.errors", "draftsmith.distill")
base += ("draftsmith.drafters", "draftsmith.drafters.versions")
base += ("draftsmith.distill.buffer", "draftsmith.distill.buffer.objects")
print([name for name in ours if not name.startswith("draftsmith.fleet") and name not in base])
print([name for name in ("torch", "transformers", "numpy", "pyarrow") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "memory://empty"], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split("\n")[:2] == ["[]", "[]"], done.stdout + done.stderr
