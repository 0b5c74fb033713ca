"""Threads around the event loop: updates of the engine's thread reach it in one wake-up, and text
is encoded on threads of its own."""

from __future__ import annotations

import asyncio
import bisect
import copy
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from draftsmith.kernels.dispatch import use_device

T = TypeVar("T")
LANES = (2**16, 2**20)  # bytes from which a body is in the next lane
NUM_COMPILING = 8  # grammars at a time


class Inbox(Generic[T]):
    """Items for one task of the event loop, which takes all that are there. Every call is made on
    the loop's thread."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[T]:
        """At least one item; waits for it."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        return items


class ThreadBridge(Generic[T]):
    """Items from any thread to inboxes of one event loop, many items per wake-up. A wake-up costs
    more than its item: system calls, and the two threads take Python's lock from each other in the
    middle of a round."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[Inbox[T], T]] = deque()
        self._woken = False

    def put(self, reader: Inbox[T], item: T) -> None:
        """Callable from any thread."""
        # The client's event loop may be gone while the engine still finishes a round.
        if self._loop.is_closed():
            return
        self._items.append((reader, item))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Before anything is taken out: an item that comes in from here on wakes the loop again.
        self._woken = False
        while self._items:
            reader, item = self._items.popleft()
            reader.put(item)


class Intake:
    """Threads that make requests of bodies. What a body brings is tokenized in order among bodies
    of its size, and grammars that are new are compiled apart: no large body, and no grammar, keeps
    a small one waiting. A request's own logits processors are tried there too, on `device`."""

    def __init__(
        self, tokenizer: Any, spare: Any = None, device: torch.device | str = "cpu"
    ) -> None:
        """`spare` is copied for further threads; no thread encodes with it."""
        self._spare, self._own = spare, threading.local()

        def begin(own: Any = None) -> None:
            use_device(device)
            if own is not None:
                self._own.tokenizer = own

        def threads(count: int, own: Any = None) -> ThreadPoolExecutor:
            name = "draftsmith-intake"
            return ThreadPoolExecutor(count, name, initializer=begin, initargs=(own,))

        self._lanes = [threads(1, tokenizer), *(threads(1) for _ in LANES)]
        self._compiling = threads(NUM_COMPILING)

    @property
    def tokenizer(self) -> Any:
        """The calling thread's own: encoding sets options of a tokenizer, and none is used by two
        threads meanwhile."""
        if not hasattr(self._own, "tokenizer"):
            self._own.tokenizer = copy.deepcopy(self._spare)
        return self._own.tokenizer

    async def run(self, work: Callable[[], T], num_bytes: int = 0) -> T:
        """`work` on a body of this size."""
        return await _result(self._lanes[bisect.bisect(LANES, num_bytes)], work)

    async def compile(self, work: Callable[[], T]) -> T:
        """`work` that waits for a grammar."""
        return await _result(self._compiling, work)


async def _result(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)
