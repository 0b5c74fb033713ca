"""Figures of a run, written to one JSON file after every change, and the time that each item gets."""

from __future__ import annotations

import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from draftsmith.files import write_json

LAST_LINES = 3  # of an error's text


class TimeUp(BaseException):
    """Raised inside an item whose time is over. No `Exception`: an engine goes on without a draft
    that raises one."""


class Report:
    """`out`/device.json: {"schema", "items": {name: {..., "seconds", "failed"}}}."""

    def __init__(self, out: Path):
        self.path, self.items = out / "device.json", dict[str, dict[str, Any]]()

    def note(self, item: str, **values: Any) -> None:
        self.items.setdefault(item, {}).update(values)
        write_json(self.path, {"schema": 1, "items": self.items})
        for name, value in values.items():
            print(f"{item}: {name}: {value}", flush=True)

    def run(self, item: str, seconds: float, work: Callable[[], None]) -> bool:
        """`work` for at most `seconds`; True where it ended by itself. Whatever it raises is noted
        and stops no other item."""
        begun_s, failed = time.monotonic(), ""
        try:
            with alarm(seconds):
                work()
        except TimeUp:
            failed = f"stopped after {seconds:.0f} s"
        except Exception as error:
            failed = "".join(traceback.format_exception_only(error)).strip()
            traceback.print_exc()
        finally:
            free_memory()
        spent = {"seconds": round(time.monotonic() - begun_s, 1)}
        self.note(item, **spent, **({"failed": last_lines(failed)} if failed else {}))
        return not failed


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """`TimeUp` in this thread after `seconds`, as soon as Python runs again."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-LAST_LINES:])
