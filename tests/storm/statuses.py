"""Statuses that engines leave in the store, read for as long as a run lasts."""

from __future__ import annotations

import threading

from draftsmith.fleet.store.layout import EngineStatus, StoreError
from draftsmith.fleet.store.store import VersionStore

LOOK_S = 0.5


class Statuses:
    """Versions reported and refused, by engine."""

    def __init__(self, store: VersionStore):
        self.store = store
        self.reported: dict[str, set[int]] = {}
        self.refused: dict[str, set[int]] = {}
        self._over = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read no more. Raises what ended the reading before."""
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                for status in self.store.engines():
                    self.add(status)
            except StoreError:
                continue  # away
            except Exception as error:
                self._error = error
                return

    def add(self, status: EngineStatus) -> None:
        self.refused.setdefault(status.engine, set()).update(status.refused)
        if status.version is not None:
            self.reported.setdefault(status.engine, set()).add(status.version)
