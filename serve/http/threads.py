"""Threads around the event loop: updates of the engine's thread reach it in one wake-up, and text
is encoded on a thread of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from draftsmith.kernels.dispatch import use_device

T = TypeVar("T")


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


class TokenizerThread:
    """One thread that tokenizes prompts and compiles grammars in order, so that a large request
    does not block the event loop. Encoding sets options of the tokenizer, so no other thread may
    use that one meanwhile. A request's own logits processors are tried on it, on `device`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="draftsmith-intake",
            initializer=use_device,
            initargs=(device,),
        )

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
