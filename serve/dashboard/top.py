"""`draftsmith top`: a running server in the terminal, redrawn in place; piped, one line per
refresh."""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import httpx

from draftsmith.api_key import bearer
from draftsmith.errors import UserError
from draftsmith.serve.dashboard.config import TopConfig
from draftsmith.serve.dashboard.top_screen import (
    ASCII_BLOCKS,
    BLOCKS,
    RED,
    Data,
    Line,
    one_line,
    render,
    screen,
)

LOOK_S = 0.1  # how soon a key or a new size of the window is noticed
POINTS = 450
OWN_SCREEN, BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def run(config: TopConfig) -> int:
    with httpx.Client(
        base_url=config.url.rstrip("/").removesuffix("/v1"),
        headers=bearer(config.api_key),
        timeout=10,
    ) as http:
        feed = Feed(http, config.url)
        feed.refresh()  # an error is printed before the screen is taken
        try:
            if sys.stdout.isatty():
                show(feed, config.every_s, sys.stdout)
            else:
                log(feed, config.every_s, sys.stdout)
        except KeyboardInterrupt:
            pass
    return 0


class Feed:
    """The newest answer, and the points of all answers so far."""

    def __init__(self, http: httpx.Client, url: str):
        self.http, self.url = http, url
        self.data: Data = {}
        self.points: deque[Data] = deque(maxlen=POINTS)

    def refresh(self) -> None:
        since = self.points[-1]["time_s"] if self.points else 0.0
        data = self._ask(since)
        if self.data and data["server"]["started_s"] != self.data["server"]["started_s"]:
            self.points.clear()
        self.data = data
        self.points.extend(data["points"])

    def _ask(self, since: float) -> Data:
        try:
            response = self.http.get("/dashboard/data", params={"since": since})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"{self.url} does not answer ({error}); check the URL and that draftsmith serve "
                "is running"
            ) from error
        if response.status_code == 401:
            raise UserError(f"{self.url} asks for an API key; give --api-key")
        if response.status_code != 200:
            raise UserError(
                f"{self.url} answers {response.status_code} to /dashboard/data; give the URL of a "
                "draftsmith server"
            )
        try:
            return response.json()
        except ValueError as error:
            raise UserError(
                f"{self.url} answers something else than JSON; give the URL of a draftsmith server"
            ) from error


def log(feed: Feed, every_s: float, stream: TextIO) -> None:
    while True:
        print(one_line(feed.data), file=stream, flush=True)
        time.sleep(every_s)
        feed.refresh()


def show(feed: Feed, every_s: float, stream: TextIO) -> None:
    """Redraw until q. A server that stops answering stays on the screen with its last data."""
    encoding = (stream.encoding or "").lower()
    blocks = BLOCKS if encoding.startswith("utf") else ASCII_BLOCKS
    trouble = ""
    with own_screen(stream), keys() as pressed:
        while True:
            size = os.get_terminal_size(stream.fileno())
            lines = screen(feed.data, feed.points, width=size.columns, blocks=blocks)
            if trouble:
                lines.insert(0, Line(trouble, RED))
            stream.write(
                render(lines, width=size.columns, height=size.lines)
                .encode(encoding or "ascii", "replace")
                .decode(encoding or "ascii")
            )
            stream.flush()
            due_s = time.monotonic() + every_s
            while time.monotonic() < due_s and os.get_terminal_size(stream.fileno()) == size:
                if pressed(LOOK_S) in ("q", "Q"):
                    return
            if time.monotonic() >= due_s:
                try:
                    feed.refresh()
                    trouble = ""
                except UserError as error:
                    trouble = str(error)


@contextmanager
def own_screen(stream: TextIO) -> Iterator[None]:
    """Switch to the terminal's second screen, and back at the end."""
    stream.write(OWN_SCREEN)
    try:
        yield
    finally:
        stream.write(BACK)
        stream.flush()


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Yield `pressed(seconds)`, which waits so long for a key; "" for none. Without a terminal on
    stdin it only waits."""
    if os.name != "posix" or not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode("ascii", "ignore") if ready else ""

    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
