"""Kills over a fleet that serves: which, when, and what was asked and answered meanwhile."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from draftsmith.fleet.store.layout import MANIFEST, StoreError, folder_of
from draftsmith.fleet.store.store import VersionStore
from tests.storm.places import FolderPlace
from tests.storm.statuses import Statuses
from tests.storm.supervisor import Part, is_running

SERVER, WRITER, STORE = "server", "writer", "store"
# A version of which one byte was changed on its way: far from the learner's numbers.
PLANTED = 900
LOOK_S = 0.05
# For a process to end after its kill.
END_S = 10.0


class Kill(NamedTuple):
    what: str
    engine: str = ""


@dataclass
class Struck:
    """A kill that was done. Times are seconds since 1970.

    Args:
        back_s: when the part was there again: another writer's process, an engine that answers,
            the place. None while it is not.
        has_hit: the process was seen to end, the place to be away.
    """

    kill: Kill
    at_s: float
    back_s: float | None = None
    pid: int = 0
    has_hit: bool = False


class Answer(NamedTuple):
    """An answer that its client got whole."""

    id: str
    prompt: list[int]
    tokens: list[int]
    engine: str
    question: int
    begun_s: float
    ended_s: float


class Failure(NamedTuple):
    """A request without a whole answer."""

    engine: str
    begun_s: float
    ended_s: float


@dataclass
class Fleet:
    """A running fleet.

    Args:
        processes: pattern of the command line by what is killed, "" for the part's first process.
        ask: whole answer of an engine to a question by its number, None where there was none.
    """

    place: FolderPlace
    store: VersionStore
    learned: Path
    parts: Mapping[str, Part]
    engines: Sequence[str]
    processes: Mapping[str, str]
    ask: Callable[[str, int], Answer | None]


@dataclass
class Log:
    answers: list[Answer] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    planted_s: float | None = None
    # versions that engines reported, and those they refused, by engine
    reported: dict[str, set[int]] = field(default_factory=dict)
    refused: dict[str, set[int]] = field(default_factory=dict)


class Storm:
    """Kills one after the other while clients ask and statuses are read.

    Args:
        pause_s: longest wait between two kills, beside that for the part to be up.
        away_s: longest absence of the place.
        patience_s: for a part to come up.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        questions: int,
        clients: int,
        seed: int,
        pause_s: float,
        away_s: float,
        patience_s: float,
    ):
        self.fleet, self.draws = fleet, random.Random(seed)
        self.pause_s, self.away_s, self.patience_s = pause_s, away_s, patience_s
        self.calm = threading.Event()
        self.statuses = Statuses(fleet.store)
        self.log = Log(reported=self.statuses.reported, refused=self.statuses.refused)
        self._returns: list[threading.Thread] = []
        self._absence: threading.Thread | None = None
        self._errors: list[Exception] = []
        self._lock = threading.Lock()
        self.clients = [
            threading.Thread(target=self._client, args=(number, questions, seed), daemon=True)
            for number in range(clients)
        ]
        for thread in self.clients:
            thread.start()

    def strike(self, kills: Sequence[Kill], *, plant_after: int) -> None:
        """All kills, and the return of what they hit. Each is in the log with what came of it."""
        for number, kill in enumerate(kills):
            time.sleep(self.draws.uniform(0.2, 1.0) * self.pause_s)
            if number == plant_after:
                self.plant()
            struck = self._leave() if kill.what == STORE else self._kill(kill)
            self.log.struck.append(struck)
            hit = f"process {struck.pid}" if struck.pid else "the place"
            ended = "is gone" if struck.has_hit else "is there still"
            print(f"kill {number + 1}: {kill.what} {kill.engine}: {hit} {ended}", flush=True)
        for thread in self._returns:
            thread.join()

    def plant(self) -> None:
        """A spoilt version becomes `current`, as by a bad upload past the publisher."""
        self._await_place()
        store = self.fleet.store
        live = store.current()
        assert live is not None
        manifest = store.manifest(live) | {"version": PLANTED}
        for name in store.sizes(live):
            data = store.objects.read(f"{folder_of(live)}/{name}")
            if name.endswith("model.safetensors"):
                data = data[:-1] + bytes([data[-1] ^ 1])
            if name != MANIFEST:
                store.objects.put(f"{folder_of(PLANTED)}/{name}", data)
        store.put_manifest(PLANTED, json.dumps(manifest).encode())
        self.log.planted_s = time.time()
        store.put_current(PLANTED)

    def planted_is_refused(self) -> bool:
        """True once an engine has refused the planted version. It becomes `current` again where the
        learner's next one came before any engine saw it."""
        if any(PLANTED in found for found in self.log.refused.values()):
            return True
        if self.fleet.store.current() != PLANTED:
            self.fleet.store.put_current(PLANTED)
        return False

    def answered(self) -> set[str]:
        """Engines with an answer that was begun after the last return."""
        last_s = last_return_s(self.log.struck)
        with self._lock:
            return {one.engine for one in self.log.answers if one.begun_s > last_s}

    def end_traffic(self) -> None:
        """End the clients. Raises what ended one of them before."""
        self.calm.set()
        for thread in self.clients:
            thread.join()
        for error in self._errors:
            raise error

    def end(self) -> None:
        self.statuses.close()

    def _kill(self, kill: Kill) -> Struck:
        part = self.fleet.parts[kill.engine or kill.what]
        pattern = self.fleet.processes.get(kill.what, "")
        deadline_s = time.monotonic() + self.patience_s
        while time.monotonic() < deadline_s:
            pid = part.find(pattern) if part.up else None
            if pid is not None:
                struck = Struck(kill, time.time(), pid=pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self._later(partial(self._await_another, struck, part, pattern))
                    struck.has_hit = has_ended(pid)
                    return struck
            time.sleep(LOOK_S)
        raise TimeoutError(f"{kill} found nothing to kill for {self.patience_s:.0f} s")

    def _await_another(self, struck: Struck, part: Part, pattern: str) -> None:
        # A writer reads before its engine answers.
        is_writer = struck.kill.what == WRITER
        deadline_s = time.monotonic() + self.patience_s
        while time.monotonic() < deadline_s:
            if (is_writer or part.up) and part.find(pattern) not in (struck.pid, None):
                self._is_back(struck)
                return
            time.sleep(4 * LOOK_S)

    def _leave(self) -> Struck:
        self._await_place()
        struck = Struck(Kill(STORE), time.time())
        self.fleet.place.leave()
        gone_s = self.draws.uniform(0.5, 1.0) * self.away_s
        struck.has_hit = self.fleet.place.is_away()

        def come_back() -> None:
            time.sleep(gone_s)
            struck.has_hit &= self.fleet.place.is_away()
            self.fleet.place.come_back()
            self._is_back(struck)

        self._absence = self._later(come_back)
        return struck

    def _is_back(self, struck: Struck) -> None:
        struck.back_s = time.time()
        what, engine = struck.kill
        print(f"back: {what} {engine} after {struck.back_s - struck.at_s:.1f} s", flush=True)

    def _later(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        self._returns.append(thread)
        thread.start()
        return thread

    def _await_place(self) -> None:
        if self._absence is not None:
            self._absence.join()

    def _client(self, number: int, questions: int, seed: int) -> None:
        draws = random.Random(f"{seed}/{number}")
        while not self.calm.is_set():
            engine, begun_s = draws.choice(self.fleet.engines), time.time()
            try:
                answer = self.fleet.ask(engine, draws.randrange(questions))
            except Exception as error:
                self._errors.append(error)
                return
            with self._lock:
                if answer is not None:
                    self.log.answers.append(answer)
                else:
                    self.log.failed.append(Failure(engine, begun_s, time.time()))
            if answer is None:
                time.sleep(LOOK_S)


def has_ended(pid: int) -> bool:
    """True once a process is gone; False where it stays for `END_S`."""
    deadline_s = time.monotonic() + END_S
    while is_running(pid):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOOK_S)
    return True


def last_return_s(struck: Sequence[Struck]) -> float:
    """Time from which on everything was there; infinity where something did not come back."""
    never = float("inf")
    return max((never if one.back_s is None else one.back_s for one in struck), default=0.0)


def converged(fleet: Fleet, limit_s: float) -> float | None:
    """Seconds until all engines, in statuses from now on, serve the learner's live version, which
    is the store's too; None where that takes longer than the limit."""
    begun_s = time.time()
    while time.time() - begun_s < limit_s:
        with suppress(StoreError, OSError):
            fresh = {
                one.engine: one.version for one in fleet.store.engines() if one.at_s > begun_s
            }  # fmt: skip
            live = fleet.store.current()
            if {fresh.get(name) for name in fleet.engines} == {live} and live == learned(fleet):
                return time.time() - begun_s
        time.sleep(LOOK_S)
    return None


def learned(fleet: Fleet) -> int | None:
    from draftsmith.drafters import versions

    return versions.latest(fleet.learned)
