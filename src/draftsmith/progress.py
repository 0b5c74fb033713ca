"""Lines of long work: progress with an ETA (tqdm's bar, in a notebook too, and a line now and then
where there is neither that nor a terminal), and those of a log. Torch-free."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from datetime import datetime
from functools import cache
from typing import Any, ClassVar
from weakref import WeakSet

LINE = "{desc}: {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}{postfix}]"
BAR = LINE.replace("{desc}:", "{l_bar}{bar}|")
SILENT_S = 8.0  # after which a bar is shown again
LOADING = "loading torch and transformers"  # said once, though a command imports in steps

LOG_FORMATS = ("text", "json")
# For processes that this one starts, whose lines stand in the same log.
LOG_FORMAT = "DRAFTSMITH_LOG_FORMAT"
CHATTY = (
    *("httpx", "uvicorn.access", "uvicorn.error"),
    # Of a buffer in an object store, in the log of the engine that writes to it.
    *("fsspec", "s3fs", "botocore", "aiobotocore"),
)


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class LogHandler(logging.StreamHandler):
    """Handler of a process that keeps a log."""

    def __init__(self, form: str):
        super().__init__()
        self.is_json = form == "json"
        text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.setFormatter(JsonFormatter() if self.is_json else text)


def set_up_logging(form: str | None = None) -> None:
    """Lines of this process and of the libraries that are imported, in one format: by default that
    of the process which started this one."""
    form = os.environ[LOG_FORMAT] = form or os.environ.get(LOG_FORMAT, LOG_FORMATS[0])
    logging.basicConfig(level=logging.INFO, handlers=[LogHandler(form)])
    logging.captureWarnings(True)
    for known in list(logging.root.manager.loggerDict.values()):
        if isinstance(known, logging.Logger):  # else each line of some would come twice
            known.handlers.clear()
            known.propagate = True
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def log_handler() -> LogHandler | None:
    return next((one for one in logging.root.handlers if isinstance(one, LogHandler)), None)


def keeps_json() -> bool:
    return (log := log_handler()) is not None and log.is_json


def say(text: str) -> None:
    """A line for the user, in the log where this process keeps one."""
    if log_handler() is not None:
        logging.getLogger("draftsmith").info(text)
    else:
        for one in list(Progress.opened):
            one._bar.clear()  # of a terminal, that the line is one of its own
        print(f"draftsmith: {text}", file=sys.stderr, flush=True)


def is_busy() -> bool:
    """True where more work waited for cores than there are, over the last minute."""
    return os.getloadavg()[0] > (os.cpu_count() or 1)


def say_busy() -> None:
    """Says why a command is slow whose threads wait for each other on cores that other work has."""
    if is_busy() and "OMP_NUM_THREADS" not in os.environ:
        say(
            f"other work has the cores (load {os.getloadavg()[0]:.1f}), beside which several "
            "threads may take many times as long as one; put OMP_NUM_THREADS=1 before the command"
        )


def factor(log10: float) -> str:
    """A power of ten as a number: "0.4" and "1e+31"."""
    return f"{10**log10:.2g}" if abs(log10) < 300 else f"1e{log10:+.0f}"


def duration(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


class Lines:
    """Stream of a log, in which each state of a bar is a line of its own."""

    def write(self, text: str) -> None:
        if not (line := text.strip()):
            return
        if keeps_json():
            logging.getLogger("draftsmith").info(line)
        else:
            print(line, file=sys.stderr, flush=True)


def draws() -> bool:
    """True where standard error is a notebook's, or a terminal that has columns."""
    if "ipykernel" in sys.modules:
        return True
    if keeps_json() or not sys.stderr.isatty():
        return False
    try:  # Some wrappers of a terminal have no descriptor; terminals of some runners no columns.
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (AttributeError, OSError, ValueError):
        return False


class Progress:
    """`Progress("generate", 200, unit="answers")`; `update(done, note="812 tok/s")`; `close()`.
    The ETA is measured from the work done since construction, so a resumed job gives `start`; `bar`
    as tqdm takes it."""

    opened: ClassVar[WeakSet[Progress]] = WeakSet()
    shown_s: ClassVar[float] = 0.0  # when one was shown again

    def __init__(
        self, label: str, total: int, *, unit: str, start: int = 0, shows: bool = True, **bar: Any
    ) -> None:
        from tqdm.auto import tqdm  # late: the reference is made without it

        self.total = total = max(total, start)  # of a longer run that goes on
        lines = {"file": Lines(), "bar_format": LINE, "mininterval": 10.0, "position": 0}
        self._bar = tqdm(
            desc=label, total=total, unit=f" {unit}", initial=start, disable=not (shows and total),
            miniters=1, dynamic_ncols=True, **bar,
            **({"bar_format": BAR} if draws() else lines),
        )  # fmt: skip
        self.opened.add(self)
        if len(self.opened) == 1:
            threading.Thread(target=watch, name="draftsmith-bars", daemon=True).start()

    def update(self, done: int, note: str = "") -> None:
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def advance(self, note: str = "") -> None:
        """One more is done, in any thread."""
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update()

    def close(self, note: str = "") -> None:
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.close()


def watch() -> None:
    """Shows the newest bar again while its step takes long: the work is seen to go on."""
    while Progress.opened:
        time.sleep(SILENT_S / 8)
        with suppress(RuntimeError):  # one was opened or left just now
            _show_again()


def _show_again() -> None:
    bars = [one._bar for one in Progress.opened if not one._bar.disable]
    shown_s = max([Progress.shown_s, *(bar.last_print_t for bar in bars)])
    if bars and time.time() - shown_s > SILENT_S:
        Progress.shown_s = time.time()  # the thread of an earlier bar may watch still
        newest = max(bars, key=lambda bar: bar.start_t)
        newest.refresh()
        newest.delay = 0  # nor does its end go unseen


say_once = cache(say)


@contextmanager
def awaited(step: str, *, shows: bool = True) -> Iterator[None]:
    """Says what is done inside, and again where that takes long: the work is seen to go on."""
    if shows:
        (say_once if step == LOADING else say)(step)
    with closing(Progress(step, 1, unit="steps", shows=shows, delay=SILENT_S)) as progress:
        yield
        progress._bar.n = 1  # which its end shows


def loading(takes_long: bool = True) -> AbstractContextManager[None]:
    """Says what a command's first seconds go to: the imports inside."""
    return awaited(LOADING) if takes_long and "torch" not in sys.modules else nullcontext()


def close_all() -> None:
    """Closes what an error left open, which would show its last state behind what is said of it."""
    for progress in list(Progress.opened):
        progress.close()
