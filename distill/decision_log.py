"""decisions.jsonl as a learner writes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftsmith.drafters.published import versions


class DecisionLog:
    """A line that a full disk refuses waits for `flush`: it must not part a decision from what follows from it."""

    def __init__(self, root: Path, tell: Callable[[str], None]):
        self.root, self.tell = root, tell
        self.waiting: list[dict[str, Any]] = []

    def add(self, decision: Mapping[str, Any]) -> None:
        self.waiting.append({"time_s": time.time(), **decision})
        self.flush()

    def flush(self) -> None:
        while self.waiting:
            try:
                versions.record_decision(self.root, self.waiting[0])
            except OSError as error:
                self.tell(f"{error}; {len(self.waiting)} decisions wait to be logged")
                return
            del self.waiting[0]
