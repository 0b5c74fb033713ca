"""Kills over processes that do nothing: what was hit, what came back, and a place that is away."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from draftsmith.fleet.store.engine_status import EngineStatus
from draftsmith.fleet.store.errors import StoreUnreachable
from draftsmith.fleet.store.store import VersionStore
from scripts.bench.fleet import places
from scripts.bench.fleet.door import Door, leads
from scripts.bench.fleet.kills import Answer, Fleet, Kill, Storm
from scripts.bench.fleet.places import FolderPlace
from scripts.bench.fleet.statuses import Statuses
from scripts.bench.fleet.supervisor import Part, is_running, program

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
# Its child is what a pattern finds; it goes on without.
CHILD = "import subprocess, sys, time; subprocess.run([sys.executable, '-S', '-c', {!r}]); {}"
PARENT = [*SLEEP[:-1], CHILD.format(f"{SLEEP[-1]} # the-writer", "time.sleep(600)")]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    parts: dict[str, Part] = {}

    def made(ask: Callable[[str, int], Answer | None] = lambda *_: None, **words: Any) -> Fleet:
        place = FolderPlace(tmp_path)
        for name, command in words.items():
            parts[name] = Part(name, program(command, tmp_path / f"{name}.log"))
        store = VersionStore(place.url("store"), sleep=lambda _: None)
        processes = {"writer": "the-writer"}
        return Fleet(place, store, tmp_path / "learned", parts, ["engine"], processes, ask)

    yield made
    for part in parts.values():
        part.stop()


def storm_of(fleet: Fleet, patience_s: float = 30.0) -> Storm:
    return Storm(
        fleet, questions=1, clients=1, seed=0, pause_s=0.02, away_s=0.2, patience_s=patience_s
    )


def test_every_kill_says_what_it_hit_and_when_that_was_back(fleet: Callable[..., Fleet]) -> None:
    def ask(engine: str, question: int) -> Answer | None:
        time.sleep(0.02)
        return Answer("a", [1], [2], engine, question, time.time(), time.time())

    made = fleet(ask, learner=SLEEP, engine=SLEEP)
    first = made.parts["learner"].process.pid
    storm = storm_of(made)
    storm.strike([Kill("learner"), Kill("store"), Kill("server", "engine")], plant_after=9)
    while not storm.answered():
        time.sleep(0.01)
    storm.end_traffic()
    storm.end()
    learner, store, server = storm.log.struck
    assert learner.pid == first and not is_running(first)
    assert made.parts["learner"].process.pid != first and made.parts["learner"].starts == 2
    assert store.pid == 0 and server.pid > 0
    for one in (learner, store, server):
        assert one.has_hit and one.back_s is not None and one.back_s > one.at_s
    figures = server.figures(server.at_s - 5)
    assert (figures["what"], figures["engine"], figures["has_hit"]) == ("server", "engine", True)
    assert figures["at_s"] == pytest.approx(5) and figures["back_after_s"] > 0


def test_a_kill_that_finds_nothing_is_an_error(fleet: Callable[..., Fleet]) -> None:
    storm = storm_of(fleet(engine=SLEEP), patience_s=0.1)
    with pytest.raises(TimeoutError, match="found nothing to kill"):
        storm.strike([Kill("writer", "engine")], plant_after=9)
    assert storm.log.struck == []


def test_a_writer_is_killed_beside_its_engine_and_one_that_stays_away_is_not_back(
    fleet: Callable[..., Fleet],
) -> None:
    made = fleet(engine=PARENT)
    while not (made.parts["engine"].up and made.parts["engine"].find("the-writer")):
        time.sleep(0.02)
    storm = storm_of(made, patience_s=0.5)
    storm.strike([Kill("writer", "engine")], plant_after=9)
    (struck,) = storm.log.struck
    assert struck.has_hit and struck.back_s is None and made.parts["engine"].starts == 1
    assert storm.answered() == set()


def test_a_place_that_stays_is_no_hit(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderPlace, "leave", lambda self: None)
    storm = storm_of(fleet())
    storm.strike([Kill("store")], plant_after=9)
    assert not storm.log.struck[0].has_hit


def test_clients_and_readers_that_die_are_errors(fleet: Callable[..., Fleet]) -> None:
    def ask(engine: str, question: int) -> Answer | None:
        raise ZeroDivisionError

    storm = storm_of(fleet(ask))
    with pytest.raises(ZeroDivisionError):
        storm.end_traffic()
    broken: Any = type("Store", (), {"engines": lambda self: 1 // 0})()
    reading = Statuses(broken)
    reading._thread.join(10)
    with pytest.raises(ZeroDivisionError):
        reading.close()


def test_statuses_keep_versions_refusals_and_pauses(tmp_path: Path) -> None:
    statuses = Statuses(VersionStore(str(tmp_path)))
    statuses.close()
    swap = {"version": 2, "pause_ms": 0.5, "ok": True}
    statuses.add(EngineStatus(engine="a", version=1, refused={900: "cut"}))
    statuses.add(EngineStatus(engine="a", version=2, last_swap=swap))
    statuses.add(EngineStatus(engine="a", version=2, last_swap=swap))
    statuses.add(EngineStatus(engine="a", version=3, last_swap={**swap, "version": 3}))
    failed = {"version": 4, "pause_ms": 9.0, "ok": False}
    statuses.add(EngineStatus(engine="a", version=3, last_swap=failed))
    assert statuses.reported == {"a": {1, 2, 3}} and statuses.refused == {"a": {900}}
    assert statuses.swaps() == {"a": {"swaps": 2, "median_ms": 0.5, "longest_ms": 0.5}}


def test_a_folder_that_is_away_can_neither_be_read_nor_written(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path)
    store = VersionStore(place.url("store"), sleep=lambda _: None)
    store.put_engine(EngineStatus(engine="a"))
    place.leave()
    assert place.is_away()
    with pytest.raises(StoreUnreachable):
        store.put_engine(EngineStatus(engine="b"))
    place.come_back()
    assert not place.is_away() and [one.engine for one in store.engines()] == ["a"]


def test_a_shut_door_refuses_and_ends_what_is_open() -> None:
    behind = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                one, _ = behind.accept()
            except OSError:
                return
            threading.Thread(target=lambda own=one: own.sendall(own.recv(9)), daemon=True).start()

    threading.Thread(target=answer, daemon=True).start()
    door = Door(behind.getsockname()[1])
    assert not leads(door.port)
    for _ in range(2):
        door.open()
        assert leads(door.port)
        used, waiting = (socket.create_connection(("127.0.0.1", door.port)) for _ in range(2))
        used.sendall(b"abc")
        assert used.recv(9) == b"abc"
        door.shut()
        assert not leads(door.port)
        with suppress(ConnectionResetError):
            assert waiting.recv(9) == b""
        used.close()
        waiting.close()
    door.close()
    behind.close()


def test_a_bucket_without_its_server_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CLIENTS", str(tmp_path / "none"))
    with (
        pytest.raises(SystemExit, match="has no moto_server; scripts/test --all makes it"),
        places.place_of("s3", tmp_path),
    ):
        pass
