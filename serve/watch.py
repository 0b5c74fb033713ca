"""Follows a folder of draft versions: whatever `current` names there, newer or rolled back, is what the server drafts with."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from draftsmith.drafters.versions import latest, open_version, stranger
from draftsmith.errors import UserError
from draftsmith.serve.drafting import PROBE
from draftsmith.serve.loop import EngineLoop
from draftsmith.serve.swap import SwapLate

log = logging.getLogger(__name__)


class VersionWatcher:
    """`serving` is the version the engine starts with, None when its draft is not from the folder.

    A version made for other weights of the target is no better than a guess: started with one, the server drafts with it seldom
    until a version for its own target is live, and it never swaps one in.
    """

    def __init__(self, loop: EngineLoop, root: str | Path, *, poll_s: float = 1.0, serving: int | None = None):
        self.loop, self.root, self.poll_s, self.serving = loop, Path(root), poll_s, serving
        self._refused: int | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftsmith-versions", daemon=True)
        if serving is not None and (reason := self._misfit(serving)):
            loop.engine.drafting.quarantined = True
            log.warning("draft version %d is in quarantine and drafts in one round of %d: %s", serving, PROBE, reason)

    def _misfit(self, version: int) -> str:
        own = self.loop.engine.target.revision
        made_for = stranger(self.root, version, own)
        return f"it was made for target revision {made_for}, this server runs {own}" if made_for else ""

    def start(self) -> VersionWatcher:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def look(self) -> bool:
        """One look; True when another version was swapped in."""
        try:
            wanted = latest(self.root)
            if wanted is None or wanted in (self.serving, self._refused):
                return False
            folder = open_version(self.root, wanted)
            reason = self._misfit(wanted)
        except UserError as error:
            return self._refuse(None, error)
        if reason:
            return self._refuse(wanted, UserError(f"version {wanted} stays out: {reason}; let distill learn for this target"))
        try:
            swap = self.loop.swap(str(folder), str(wanted))
        except SwapLate as error:
            return self._refuse(None, error)  # the next look tries it again
        except UserError as error:
            return self._refuse(wanted, error)
        log.info("draft version %d swapped in, pause %.1f ms", wanted, 1000 * swap.pause_s)
        self.serving, self._refused = wanted, None
        return True

    def _refuse(self, version: int | None, error: UserError) -> bool:
        """Says so once; the served draft stays."""
        if version is not None:
            self._refused = version
        if str(error) != self._last_error:
            log.warning("draft version refused: %s", error)
            self._last_error = str(error)
        return False

    _last_error = ""

    def _run(self) -> None:
        while not self._stopping.wait(self.poll_s):
            try:
                self.look()
            except OSError as error:
                # A shared folder may be away for a moment.
                log.warning("the versions folder cannot be read: %s", error)
