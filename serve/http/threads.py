"""From the engine's thread to the event loop's: one wake-up for all that comes before it looks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Of one event loop, for all its readers. A wake-up of another thread costs more than what it
    brings: system calls, and the two threads take Python's lock from each other in the middle of a
    round."""

    def __init__(self) -> None:
        self._here = asyncio.get_running_loop()
        self._mail: deque[tuple[asyncio.Queue[T], T]] = deque()
        self._called = False

    def put(self, reader: asyncio.Queue[T], item: T) -> None:
        """From any thread."""
        # The client's event loop may be gone while the engine still finishes a round.
        if self._here.is_closed():
            return
        self._mail.append((reader, item))
        if not self._called:
            self._called = True
            self._here.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Before anything is taken out: what comes in from here on calls again.
        self._called = False
        while self._mail:
            reader, item = self._mail.popleft()
            reader.put_nowait(item)


class Aside:
    """One thread, in order: encoding sets options of the tokenizer, so nobody else may use that one
    meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draftsmith-intake")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
