"""Watch of a folder of draft versions: the version that `current` names there, newer or rolled
back, is swapped in.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from transformers.utils import logging as transformers_logging

from draftsmith.drafters.versions import folder_of, latest, open_version, stranger
from draftsmith.errors import UserError
from draftsmith.files import Signature, signature
from draftsmith.kernels.dispatch import use_device
from draftsmith.serve.config import LearningOptions
from draftsmith.serve.engine.live_draft import PROBE, SwapLate
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.load import LoadedDraft

log = logging.getLogger(__name__)


class VersionWatcher:
    """`serving` is the version the engine starts with, None when its draft is not from the folder;
    `refused` the error of the live one that it could not start with, which is logged already.

    A version made for other weights of the target is in quarantine: a server started with one
    drafts with it seldom until a version for its own target is live, and never swaps one in.
    """

    def __init__(
        self,
        loop: EngineLoop,
        root: str | Path,
        *,
        poll_s: float = 1.0,
        serving: int | None = None,
        refused: str = "",
    ):
        self.loop, self.root, self.poll_s, self.serving = loop, Path(root), poll_s, serving
        self._refused: tuple[int, Signature] | None = None  # with the files that it had then
        self._last_error = refused
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftsmith-versions", daemon=True)
        if serving is not None and (reason := self._misfit(serving)):
            loop.quarantine()
            log.warning(
                "draft version %d is in quarantine and drafts in one round of %d: %s",
                serving,
                PROBE,
                reason,
            )

    def start(self) -> VersionWatcher:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def look(self) -> bool:
        """Look at the folder once; True when another draft was swapped in."""
        try:
            wanted = latest(self.root)
        except UserError as error:
            return self._log_once(error)
        return wanted is not None and self._serve(wanted)

    def _serve(self, wanted: int) -> bool:
        """Serve the version `wanted`; True when another version was swapped in."""
        if wanted == self.serving:
            return False
        seen = wanted, signature(folder_of(self.root, wanted), "**/*")
        if seen == self._refused:
            return False
        try:
            folder = open_version(self.root, wanted)
            if reason := self._misfit(wanted):
                raise UserError(
                    f"version {wanted} stays out: {reason}; let distill learn for this target"
                )
            swap = self.loop.swap(str(folder), str(wanted))
        except SwapLate as error:
            return self._log_once(error)  # the next look tries it again
        except UserError as error:
            self._refused = seen
            return self._log_once(error)
        log.info("draft version %d swapped in, pause %.1f ms", wanted, 1000 * swap.pause_s)
        self.serving, self._refused = wanted, None
        return True

    def _misfit(self, version: int) -> str:
        own = self.loop.engine.target.revision
        made_for = stranger(self.root, version, own)
        return (
            f"it was made for target revision {made_for}, this server runs {own}"
            if made_for
            else ""
        )

    def _log_once(self, error: UserError) -> bool:
        """Log an error once; the served draft stays."""
        if str(error) != self._last_error:
            log.warning("draft version refused: %s", error)
            self._last_error = str(error)
        return False

    def _run(self) -> None:
        # Versions are loaded and checked on this thread.
        use_device(self.loop.engine.target.device)
        wrong = ""  # of the look before: each error is logged once, and again when it comes back
        while not self._stopping.wait(self.poll_s):
            before, wrong = wrong, ""
            try:
                self.look()
            except OSError as error:
                # A shared folder may be away for a moment.
                wrong = str(error)
                if wrong != before:
                    log.warning("the versions folder cannot be read: %s", error)
            except Exception as error:
                # This thread alone follows the folder: whatever is wrong with this version, the
                # next one has to be seen.
                wrong = repr(error)
                if wrong != before:
                    log.exception("the versions folder cannot be followed; the served draft stays")


def watch_versions(
    learning: LearningOptions, loop: EngineLoop, draft: LoadedDraft
) -> VersionWatcher:
    # A swap is one line of the log: no bar for every version that is read.
    transformers_logging.disable_progress_bar()
    assert learning.versions is not None
    return VersionWatcher(
        loop, learning.versions, poll_s=learning.poll_s, serving=draft.number, refused=draft.refused
    ).start()
