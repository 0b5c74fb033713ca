"""Choices among ways to do one kind of work, by their times on this machine.

Which way is fastest is a matter of the processor, and no name of a vendor gives it. Ways are timed
when work of a shape is first met. Choices are kept in the folder of compiled libraries, by
processor, version of torch, threads, sources and shape: the next start times nothing, but what was
timed while other work had the cores.

`DRAFTSMITH_MEASURE` is "again" to time anew what is kept, and "off" to take the first way of each.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import resource
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter, time
from typing import Any, NamedTuple

import torch

from draftsmith.files import atomic_path, cache_folder, locked
from draftsmith.kernels.host_compiler import processor
from draftsmith.progress import is_busy

log = logging.getLogger(__name__)

VARIABLE = "DRAFTSMITH_MEASURE"
SCHEMA_VERSION = 1
MOST_S = 1.0  # of timing in a process, for each kind of work
TURNS = 5
MOST_TRIES = 5  # of a turn, where other work comes between
AFTER_S = 600.0  # processes that train together start within it, and must choose alike
FAR_BEHIND = 1.25  # a way that takes this much longer than the fastest is not timed again

Way = Callable[[], object]
Clock = Callable[[str, Way], float]


def interruptions() -> int:
    """Number of times that threads of this process had to make room for other work."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def timed(name: str, way: Way, count: Callable[[], int] = interruptions) -> float:
    """Seconds that a call of `way` takes, the least of some where other work came between: on a
    loaded machine a wait for a core is many times as long as the call."""
    least_s = math.inf
    for _ in range(MOST_TRIES):
        before, begun_s = count(), perf_counter()
        way()
        least_s = min(least_s, perf_counter() - begun_s)
        if count() == before:
            break
    return least_s


class MeasuredChoice(NamedTuple):
    kind: str
    shape: str
    threads: int
    way: str
    seconds: dict[str, float]  # the least of each way
    busy_s: float = 0.0  # when it was timed, in Unix time, where the machine was busy then


class Choices:
    """Choices of one processor, kept in `folder`, by default in that of compiled libraries.
    `clock` gives the seconds of a named way, `most_s` is as `MOST_S`."""

    def __init__(
        self,
        folder: Path | None = None,
        clock: Clock = timed,
        most_s: float = MOST_S,
        busy: Callable[[], bool] = is_busy,
    ):
        self._folder, self._clock, self._most_s, self._busy = folder, clock, most_s, busy
        self._known: dict[str, MeasuredChoice] | None = None
        self._made: set[str] = set()  # keys of what this process has timed
        self._taken: set[str] = set()
        self._spent_s: dict[str, float] = defaultdict(float)
        self._lock = threading.RLock()

    def fastest(
        self,
        kind: str,
        shape: Sequence[object],
        names: Sequence[str],
        prepare: Callable[[], Mapping[str, Way]],
        *,
        sources: Sequence[Path] = (),
    ) -> str:
        """The name of the fastest of some ways to do work of `shape`; arguments are those of
        `choice`, where nothing is timed it is the first."""
        found = self.choice(kind, shape, names, prepare, sources=sources)
        return names[0] if found is None else found.way

    def choice(
        self,
        kind: str,
        shape: Sequence[object],
        names: Sequence[str],
        prepare: Callable[[], Mapping[str, Way]],
        *,
        sources: Sequence[Path] = (),
    ) -> MeasuredChoice | None:
        """The fastest of some ways to do work of `shape`, with their times; None where nothing is
        timed.

        Args:
            names: of ways.
            prepare: called where ways are to be timed; those of `names` that there are here. A call
            of one takes about a millisecond, and finds in the caches what it finds there in use.
            sources: of kernels; other contents are other ways.
        """
        mode, threads = os.environ.get(VARIABLE, ""), torch.get_num_threads()
        if mode == "off" or len(names) == 1:
            return None
        with self._lock:
            key = _key(kind, shape, threads, sources)
            found = self._all().get(key)
            self._taken.add(key)
            if found is not None and found.way in names:
                again = mode == "again" or _is_doubtful(found)
                if not again or key in self._made or self._spent_s[kind] >= self._most_s:
                    return found
            if self._spent_s[kind] >= self._most_s:
                return None
            begun_s = perf_counter()
            seconds = _least(prepare(), self._clock)
            self._spent_s[kind] += perf_counter() - begun_s
            way = min(seconds, key=seconds.__getitem__, default=names[0])
            busy_s = time() if self._busy() else 0.0
            made = MeasuredChoice(kind, _text(shape), threads, way, seconds, busy_s)
            log.debug("%s %s: %s of %s", kind, made.shape, way, seconds)
            self._made.add(key)
            return self._keep(key, made, replace=mode == "again")

    def known(self) -> list[MeasuredChoice]:
        """Those that are kept for this processor."""
        with self._lock:
            return sorted(self._all().values(), key=lambda one: one[:4])

    def lines(self) -> list[str]:
        """Choices that this process took, a line each, with the ms of the way and of the second."""
        with self._lock:
            taken = [self._all()[key] for key in self._taken if key in self._all()]
        return [_line(one) for one in sorted(taken, key=lambda one: one[:4])]

    def _all(self) -> dict[str, MeasuredChoice]:
        if self._known is None:
            self._known = {}
            with suppress(OSError):
                self._known = _read(self._path())
        return self._known

    def _path(self) -> Path:
        machine = f"{processor()} {torch.__version__}"
        digest = hashlib.sha256(machine.encode()).hexdigest()[:16]
        return (self._folder or cache_folder()) / f"choices-{digest}.json"

    def _keep(self, key: str, made: MeasuredChoice, *, replace: bool) -> MeasuredChoice:
        """Keeps a choice, unless another process has kept one meanwhile."""
        known = self._all()
        try:
            path = self._path()
            with locked(path):
                known = _read(path) if path.exists() else {}
                other = known.get(key)
                if replace or not other or other.way not in made.seconds or _is_doubtful(other):
                    known[key] = made
                    _write(path, known)
        except OSError as error:  # a home that cannot be written
            log.debug("choices are not kept: %s", error)
            known[key] = made
        self._known = known
        return known[key]


CHOICES = Choices()


def _key(kind: str, shape: Sequence[object], threads: int, sources: Sequence[Path]) -> str:
    contents = b"".join(source.read_bytes() for source in sources)
    digest = hashlib.sha256(contents).hexdigest()[:8]
    return f"{kind} {_text(shape)}, {threads} threads, {digest}"


def _is_doubtful(choice: MeasuredChoice) -> bool:
    return bool(choice.busy_s) and time() - choice.busy_s > AFTER_S


def _line(choice: MeasuredChoice) -> str:
    others = {way: s for way, s in choice.seconds.items() if way != choice.way}
    second = min(others, key=others.__getitem__, default="")
    beside = f" ({second} {1e3 * others[second]:.2f} ms)" if second else ""
    taken = f"{choice.way}, {1e3 * choice.seconds[choice.way]:.2f} ms{beside}"
    return f"{choice.kind}, {choice.shape}: {taken}"


def _text(shape: Sequence[object]) -> str:
    return " ".join(str(part).removeprefix("torch.") for part in shape)


@torch.no_grad()
def _least(ways: Mapping[str, Way], clock: Clock) -> dict[str, float]:
    """The least seconds of each way; they take turns, so that a loaded machine slows them alike."""
    for way in ways.values():
        way()  # touches pages, compiles
    seconds, left = dict.fromkeys(ways, math.inf), list(ways)
    for _ in range(TURNS):
        for name in left:
            seconds[name] = min(seconds[name], clock(name, ways[name]))
        most_s = FAR_BEHIND * min(seconds.values(), default=0.0)
        left = [name for name in left if seconds[name] <= most_s]
    return seconds


def _read(path: Path) -> dict[str, MeasuredChoice]:
    """Nothing of a file that is missing, damaged or of another schema."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        if value["schema_version"] == SCHEMA_VERSION:
            return {key: MeasuredChoice(**choice) for key, choice in value["choices"].items()}
    except (FileNotFoundError, ValueError, TypeError, LookupError, AttributeError):
        pass
    return {}


def _write(path: Path, known: Mapping[str, MeasuredChoice]) -> None:
    choices = {key: choice._asdict() for key, choice in known.items()}
    text = json.dumps({"schema_version": SCHEMA_VERSION, "choices": choices}, indent=1)
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
