"""Updates of the draft that others make: vLLM's own weight updates, sleep and wake.

After each, the draft's version is not known until its weights are looked at. An update of vLLM that
fails half-way, or is not gone on with, leaves tensors without memory in the draft, and the engine's
next step would end it: the module gets its tensors back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftsmith.fleet.engine import around
from draftsmith.fleet.swaps.proposer import Snapshot, restore, snapshot
from draftsmith.fleet.swaps.swap import Swaps


class Watch:
    """Wraps methods of one worker. `on_change` is called when the version is lost."""

    def __init__(self, worker: Any, swaps: Swaps, on_change: Callable[[], None]):
        self.worker, self.swaps, self.on_change = worker, swaps, on_change
        self.saved: Snapshot = []
        around(worker, "start_draft_weight_update", before=self._begin, failed=self._mend)
        around(worker, "update_weights", failed=self._mend)
        around(worker, "finish_weight_update", after=self._finish, failed=self._mend)
        around(worker, "execute_model", before=self._mend_if_torn)
        around(worker, "sleep", before=self._sleep)
        around(worker, "wake_up", after=self._wake)

    def _begin(self) -> None:
        self.saved = snapshot(self.swaps.proposer.model)

    def _finish(self) -> None:
        if self.saved:
            self.saved = []
            self._lost("vLLM's own weight update wrote into the draft")

    def _mend(self) -> None:
        if self.saved:
            saved, self.saved = self.saved, []
            restore(saved)
            self._lost("vLLM's own weight update of the draft failed; its tensors were put back")

    def _mend_if_torn(self) -> None:
        """A step comes in the midst of an update, whose caller has perhaps died."""
        if self.saved and any(one.is_meta for one in self.swaps.proposer.model.parameters()):
            self._mend()

    def _sleep(self) -> None:
        self.swaps.is_asleep = True

    def _wake(self) -> None:
        self.swaps.is_asleep = False
        self._lost("the engine slept")

    def _lost(self, reason: str) -> None:
        self.swaps.forget(reason)
        self.on_change()
