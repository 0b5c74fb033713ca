"""`draftsmith fleet`: what a fleet serves, shown and changed by hand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli import main
from draftsmith.drafters import versions
from draftsmith.fleet.config import FleetConfig
from draftsmith.fleet.store import show
from draftsmith.fleet.store.layout import EngineStatus, StoreUnreachable
from draftsmith.fleet.store.mirror import run as publish
from draftsmith.fleet.store.show import view_of
from draftsmith.fleet.store.store import VersionStore

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def one(*arguments: Any) -> tuple[int, str, str]:
        code = main(["fleet", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return one


def learn(root: Path) -> int:
    def save(folder: Path) -> None:
        (folder / "model.safetensors").write_text(f"weights of {folder.name}")

    parent = versions.latest(root)
    return versions.publish(
        root, save, family="fake", target={}, parent=parent, data_range={}, gate={}
    )


@pytest.fixture
def store(tmp_path: Path, run: Run) -> VersionStore:
    """Two versions, published by the command."""
    root, url = tmp_path / "learner", str(tmp_path / "store")
    for _ in range(2):
        learn(root)
        code, out, err = run("publish", "--versions", root, "--to", url, "--once")
        assert code == 0, err
    assert out.startswith("fleet: what ") and out.endswith("version 2 is live for all engines\n")
    return VersionStore(url, cache=tmp_path / "cache")


def test_publishing_needs_a_learners_folder_an_address_and_known_layouts(
    run: Run, tmp_path: Path
) -> None:
    here = ("publish", "--versions", tmp_path / "none")
    assert run(*here) == (
        2,
        "",
        "draftsmith: error: fleet publish needs the address that engines read; give --to\n",
    )
    assert "does not exist; start draftsmith distill first" in run(*here, "--to", "s", "--once")[2]
    assert "it must be one of vllm" in run(*here, "--to", "s", "--layouts", "vlm")[2]
    assert "'keep' is -1; it must be at least 0" in run(*here, "--keep", -1)[2]
    assert run("publish", "--versions", tmp_path, "--to", "nothing://s", "--once")[0] == 2


@pytest.mark.parametrize("comes", [True, False])
def test_a_publisher_waits_for_the_folder_of_its_learner(
    comes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The three commands of a guide are started at once, and the learner loads a target first."""
    root, stop = tmp_path / "learner", threading.Event()
    store = VersionStore(str(tmp_path / "store"), cache=tmp_path / "cache")

    def learner() -> None:
        while "waiting for versions folder" not in (said := capsys.readouterr().out):
            assert not said
            time.sleep(0.01)
        if comes:
            learn(root)
            while store.current() is None:
                time.sleep(0.01)
        stop.set()

    other = threading.Thread(target=learner)
    other.start()
    options = {"versions": str(root), "to": store.url, "layouts": (), "poll_s": 0.01}
    assert publish(FleetConfig(action="publish", **options), stop) == 0
    other.join()
    assert store.current() == (1 if comes else None) and root.exists() is comes


def test_a_second_publisher_of_a_folder_is_refused(run: Run, tmp_path: Path) -> None:
    from draftsmith.lock import folder_lock

    with folder_lock(tmp_path, "publisher"):
        error = run("publish", "--versions", tmp_path, "--to", tmp_path / "s", "--once")[2]
    assert "another publisher (process" in error


def test_status_names_every_engine_its_figures_and_what_it_refused(
    run: Run, store: VersionStore
) -> None:
    code, out, _ = run("status", "--versions", store.url)
    assert (code, out) == (0, "version 2 is live; no engine\n")
    store.put_engine(
        EngineStatus(
            engine="a",
            version=2,
            alpha=0.4321,
            tau=1.75,
            tokens_per_s=1234.5,
            z=-0.3,
            last_swap={"version": 2, "pause_ms": 3.25, "ok": True},
            at_s=time.time(),
        )
    )
    store.put_engine(
        EngineStatus(
            engine="b", version=1, refused={1: "old", 2: "torn"}, alarm=True,
            at_s=time.time(),
        )
    )  # fmt: skip
    store.put_engine(EngineStatus(engine="c", version=2, at_s=time.time() - 3600))
    lines = run("status", "--versions", store.url)[1].splitlines()
    assert lines[0] == "version 2 is live; 1 on version 1, 1 on version 2; 1 silent"
    head, _, a, b, c = [" ".join(line.replace("|", " ").split()) for line in lines[1:]]
    assert head == "engine version alpha tau tok/s z last swap seen note"
    assert a == "a 2 0.432 1.75 1234 -0.3 3.2 ms 0s ago"
    assert b.endswith(
        "samples another distribution than the target's; should serve 2; refused 2: torn"
    )
    assert c.split()[-3:] == ["1h00m", "ago", "silent"]
    view = json.loads(run("status", "--versions", store.url, "--json")[1])
    assert view["current"] == 2 and view["stored"] == [1, 2]
    assert [row["engine"] for row in view["engines"]] == ["a", "b", "c"]
    assert view["engines"][1]["refused"] == {"1": "old", "2": "torn"}
    assert view["engines"][1]["alarm"]
    assert view["engines"][2]["is_silent"]


def test_rollback_goes_to_the_parent_and_promote_to_what_is_named(
    run: Run, store: VersionStore
) -> None:
    assert run("status", "--versions", "no/such")[1].startswith("no version is live in no/such; no")
    address = ("--versions", store.url)
    assert run("promote", *address)[2] == (
        "draftsmith: error: give the --version to promote, one of 1, 2\n"
    )
    assert "version 9 is not in" in run("promote", *address, "--version", 9)[2]
    assert run("rollback", *address)[1] == "version 1 is live for all engines instead of 2\n"
    assert store.current() == 1
    assert (
        "version 1 has no parent to go back to; give the --version" in run("rollback", *address)[2]
    )
    assert run("promote", *address, "--version", 2)[0] == 0 and store.current() == 2


def test_watching_outlives_a_store_that_is_away(
    run: Run, store: VersionStore, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    looks: list[float] = []

    def sleep(wait_s: float) -> None:
        looks.append(wait_s)
        if len(looks) == 2:
            raise KeyboardInterrupt

    def away(_: VersionStore) -> Any:
        raise StoreUnreachable("the store is away")

    def first(one: VersionStore) -> Any:
        monkeypatch.setattr(show, "view_of", away)
        return view_of(one)

    monkeypatch.setattr(show.time, "sleep", sleep)
    monkeypatch.setattr(show, "view_of", first)
    code, out, err = run("status", "--versions", store.url, "--watch")
    assert (code, looks) == (130, [5.0, 5.0])
    assert out == "version 2 is live; no engine\n" and "fleet: the store is away" in err


def test_a_store_that_cannot_be_read_ends_in_one_sentence(run: Run, store: VersionStore) -> None:
    (Path(store.url) / "current").write_text("two")
    code, _, err = run("status", "--versions", store.url)
    assert code == 2 and err.startswith("draftsmith: error: 'current' of the store holds b'two'")
    assert run("promote", "--versions", store.url, "--version", 1)[0] == 0, "which mends it"
    assert store.current() == 1
