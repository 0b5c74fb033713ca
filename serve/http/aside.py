"""What a request's text costs before it has a place in the queue is paid on a thread beside the event loop's.

A large body or a grammar takes seconds; on the event loop's own thread every stream would stand still meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Aside:
    """One thread, in order: encoding sets options of the tokenizer, so nobody else may use that one meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draftsmith-intake")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
