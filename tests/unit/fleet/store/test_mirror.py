"""Publisher of a fleet: killed anywhere, it leaves readers a verified version and goes on from
there."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.drafters import versions
from draftsmith.errors import UserError
from draftsmith.fleet.config import FleetConfig
from draftsmith.fleet.store.layout import EngineStatus, StoreError, StoreUnreachable
from draftsmith.fleet.store.mirror import Mirror, run
from draftsmith.fleet.store.store import VersionStore
from tests.waiting import wait_until


class Copies:
    """Layouts that are copies of the checkpoint's weights."""

    def __init__(self, root: Path, layouts: tuple[str, ...] = ("vllm",)):
        self.root, self.layouts = root, layouts

    def write(self, folder: Path) -> dict[str, Path]:
        for layout in self.layouts:
            out = self.root / "fleet" / folder.name / layout
            out.mkdir(parents=True, exist_ok=True)
            weights = (folder / "model.safetensors").read_text()
            (out / "model.safetensors").write_text(f"{layout} {weights}")
        return {layout: self.root / "fleet" / folder.name / layout for layout in self.layouts}

    def clear(self, folder: Path) -> None:
        shutil.rmtree(self.root / "fleet", ignore_errors=True)


def learn(root: Path, text: str = "") -> int:
    def save(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text(text or uuid.uuid4().hex)

    parent = versions.latest(root)
    return versions.publish(
        root, save, family="fake", target={}, parent=parent, data_range={}, gate={}
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "versions"


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(f"memory://{uuid.uuid4().hex}", cache=tmp_path / "cache")


def served(store: VersionStore) -> str | None:
    """Weights that an engine gets now."""
    live = store.current()
    return None if live is None else (store.fetch(live, "vllm") / "model.safetensors").read_text()


def test_what_the_learner_makes_live_reaches_engines_with_its_parent(
    root: Path, store: VersionStore
) -> None:
    mirror = Mirror(root, store, Copies(root))
    assert not mirror.step() and served(store) is None
    learn(root, "one"), learn(root, "two"), learn(root, "three")
    assert mirror.step() and served(store) == "vllm three"
    assert store.versions() == [2, 3], "the live one and what a rollback goes to"
    assert store.manifest(3)["parent"] == 2 and store.manifest(3)["layouts"] == ["vllm"]
    assert not mirror.step() and not (root / "fleet").exists()
    versions.rollback(root, 2, "worse")
    assert mirror.step() and served(store) == "vllm two"
    versions.rollback(root, 1, "worse")
    assert mirror.step() and served(store) == "vllm one" and store.versions() == [1, 2, 3]


def test_an_operators_choice_holds_until_the_learners_next_one(
    root: Path, store: VersionStore
) -> None:
    mirror = Mirror(root, store, Copies(root))
    learn(root, "one"), learn(root, "two")
    mirror.step()
    store.put_current(1)
    assert not mirror.step() and not Mirror(root, store, Copies(root)).step()
    assert served(store) == "vllm one"
    learn(root, "three")
    assert mirror.step() and served(store) == "vllm three"


def test_a_layout_that_is_asked_for_later_is_added(root: Path, store: VersionStore) -> None:
    learn(root, "one")
    Mirror(root, store, Copies(root, ())).step()
    with pytest.raises(StoreError, match="has no layout 'vllm'"):
        served(store)
    Mirror(root, store, Copies(root, ("vllm",))).upload(1)
    Mirror(root, store, Copies(root, ("sglang",))).upload(1)
    assert store.manifest(1)["layouts"] == ["sglang", "vllm"] and served(store) == "vllm one"


def test_a_store_of_another_learner_is_refused(
    root: Path, store: VersionStore, tmp_path: Path
) -> None:
    learn(root, "one")
    Mirror(root, store, Copies(root)).step()
    other = tmp_path / "other"
    for text in ("uno", "due"):  # the live one is here, too; its parent alone is
        learn(other, text)
        with pytest.raises(UserError, match=r"version 1 in 'memory:.* is another one than the l"):
            Mirror(other, store, Copies(other)).step()
    assert served(store) == "vllm one" and store.versions() == [1]


def test_damaged_weights_are_not_published_and_a_damaged_parent_is_left_behind(
    root: Path, store: VersionStore
) -> None:
    learn(root, "one"), learn(root, "two"), learn(root, "three")
    events: list[str] = []
    mirror = Mirror(root, store, Copies(root), event=events.append)
    for version in (1, 2, 3):
        (versions.folder_of(root, version) / "model.safetensors").write_text("torn")
    assert not mirror.step() and "version 3 is corrupt" in events[-1]
    (versions.folder_of(root, 3) / "model.safetensors").write_text("three")
    assert mirror.step() and served(store) == "vllm three" and store.versions() == [3]
    assert any("is published without its parent" in event for event in events)


def test_a_damaged_live_version_waits_for_the_learners_next_one(
    root: Path, store: VersionStore
) -> None:
    events: list[str] = []
    mirror = Mirror(root, store, Copies(root), event=events.append)
    learn(root, "one")
    assert mirror.step()
    learn(root, "two"), learn(root, "three")
    weights, events[:] = versions.folder_of(root, 3) / "model.safetensors", []
    weights.write_text("torn")
    assert not mirror.step() and not mirror.step() and served(store) == "vllm one"
    (event,) = events
    assert "version 3 is corrupt" in event and event.endswith("until the learner's next one")
    (root / versions.CURRENT).write_bytes(b"")
    assert not mirror.step() and len(events) == 2 and "instead of a version" in events[1]
    weights.write_text("three")
    (root / versions.CURRENT).write_text("3")
    assert mirror.step() and served(store) == "vllm three" and not mirror.damage


def test_publish_outlives_a_folder_without_a_whole_version(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = FleetConfig(
        action="publish", versions=str(root), to=str(tmp_path / "store"), poll_s=0.01
    )
    learn(root, "one")
    (versions.folder_of(root, 1) / "model.safetensors").write_text("torn")
    with pytest.raises(UserError, match="version 1 is corrupt"):
        run(replace(config, once=True))
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(config, stop))
    thread.start()
    try:
        time.sleep(0.2)
        learn(root, "two")
        wait_until(lambda: VersionStore(config.to or "").current() == 2)
    finally:
        stop.set()
        thread.join()
    # Once by either run.
    assert capsys.readouterr().out.count("until the learner's next one") == 2


def test_a_cut_upload_is_noticed_by_the_publisher(
    root: Path, store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(root, "one")
    mirror, whole = Mirror(root, store, Copies(root)), store.upload

    def cut(path: Path, name: str) -> None:
        whole(path, name)
        if name.endswith("vllm/model.safetensors"):
            store.put(name, b"vl")

    monkeypatch.setattr(store, "upload", cut)
    with pytest.raises(StoreUnreachable, match=r"has 2 bytes in .* instead of 8; it is uploaded"):
        mirror.step()
    assert store.current() is None and store.versions() == [1]
    monkeypatch.undo()
    assert mirror.step() and served(store) == "vllm one"


def test_retention_keeps_the_newest_and_whatever_is_in_use(root: Path, store: VersionStore) -> None:
    mirror = Mirror(root, store, Copies(root), keep=2)
    for text in ("one", "two"):
        learn(root, text)
        mirror.step()
    store.put_engine(EngineStatus(engine="late", version=1, at_s=time.time()))
    store.put("v000099/model.safetensors", b"of a version that the learner has not")
    for text in ("three", "four", "five"):
        learn(root, text)
        mirror.step()
    assert store.versions() == [1, 4, 5]
    store.put_engine(EngineStatus(engine="late", version=1, at_s=1.0))
    learn(root, "six")
    mirror.step()
    assert store.versions() == [5, 6] and served(store) == "vllm six"


class Killed(BaseException):
    """The end of a process, which no handler catches."""


def kill_at(store: VersionStore, at: int, look: Callable[[], None]) -> Callable[[], None]:
    """Ends the process in the midst of its `at`-th change of the store, and runs `look` after each.
    Half of a file is written by then, as on file systems without atomic puts."""
    counter, objects = itertools.count(), store
    puts = {"put": objects.put, "upload": objects.upload}

    def changed(name: str, whole: Callable[[], None], half: Callable[[], None]) -> None:
        if next(counter) == at:
            half()
            look()
            raise Killed(name)
        whole()
        look()

    def put(name: str, data: bytes) -> None:
        changed(
            name, lambda: puts["put"](name, data), lambda: puts["put"](name, data[: len(data) // 2])
        )

    def upload(path: Path, name: str) -> None:
        data = path.read_bytes()
        changed(
            name,
            lambda: puts["upload"](path, name),
            lambda: puts["put"](name, data[: len(data) // 2]),
        )

    objects.put, objects.upload = put, upload  # type: ignore[method-assign]

    def undo() -> None:
        objects.put, objects.upload = puts["put"], puts["upload"]  # type: ignore[method-assign]

    return undo


def test_killed_behind_a_promotion_a_rollback_of_the_learner_is_not_missed(
    root: Path, store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(root, "one")
    Mirror(root, store, Copies(root)).step()
    learn(root, "two")
    mirror = Mirror(root, store, Copies(root))
    remember = mirror.remember

    def killed(version: int | None) -> None:
        if version is not None:
            raise Killed
        remember(version)

    monkeypatch.setattr(mirror, "remember", killed)
    with pytest.raises(Killed):
        mirror.step()
    assert served(store) == "vllm two"
    versions.rollback(root, 1, "worse")
    assert Mirror(root, store, Copies(root)).step() and served(store) == "vllm one"


@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["learn", "roll back"]), st.none() | st.integers(0, 12)),
        min_size=1,
        max_size=5,
    )
)
def test_killed_at_any_change_readers_get_a_verified_version_and_versions_converge(
    turns: list[tuple[str, int | None]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "versions"
        store = VersionStore(f"memory://{uuid.uuid4().hex}", cache=Path(folder) / "cache")
        published: set[str | None] = {None}
        last: list[str | None] = [None]

        def look() -> None:
            """An engine reads: what it gets was published whole, or it keeps what it has."""
            try:
                last[0] = served(store)
            except StoreError as error:
                assert not isinstance(error, StoreUnreachable)
            assert last[0] in published

        for number, (turn, at) in enumerate(turns):
            present = versions.versions(root)
            if turn == "roll back" and len(present) > 1:
                versions.rollback(root, present[number % len(present)], "chosen")
            else:
                learn(root, f"text {number}")
                published.add(f"vllm text {number}")
            undo = kill_at(store, 10**9 if at is None else at, look)
            try:
                Mirror(root, store, Copies(root), keep=2).step()
            except Killed:
                pass
            finally:
                undo()
            look()
        Mirror(root, store, Copies(root), keep=2).step()
        live = versions.latest(root)
        assert store.current() == live
        expected = (versions.open_version(root, live) / "model.safetensors").read_text()
        assert served(store) == f"vllm {expected}"
