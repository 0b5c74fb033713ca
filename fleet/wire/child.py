"""Writer process of the fleet, from the engine's side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.shared_memory import child
from draftsmith.shared_memory.child import CAPACITY

WRITER = "draftsmith.fleet.wire.writer"


class WriterChild(child.Child):
    """Process `draftsmith.fleet.wire.writer` and its ring. A new process has no request of the one
    before, whose `generation` is another.

    Args:
        job: JSON values of `draftsmith.fleet.wire.requests.EngineJob`.
    """

    def __init__(
        self, job: Mapping[str, Any], *, share: float = 1.0, capacity: int = CAPACITY
    ) -> None:
        super().__init__(WRITER, job, share=share, capacity=capacity)
