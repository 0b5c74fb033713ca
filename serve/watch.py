"""Watch of a folder of draft versions: the version that `current` names there, newer or rolled
back, is swapped in. So is the version on trial that `canary.json` names, beside the live one.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from transformers.utils import logging as transformers_logging

from draftsmith.drafters.versions import (
    Canary,
    folder_of,
    latest,
    open_version,
    read_canary,
    stranger,
)
from draftsmith.errors import UserError
from draftsmith.files import Signature, signature
from draftsmith.kernels.dispatch import use_device
from draftsmith.serve.config import LearningOptions
from draftsmith.serve.drafts.served import PROBE
from draftsmith.serve.drafts.swap import SwapLate
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.load import LoadedDraft
from draftsmith.serve.requests.request import CANARY, LIVE, shown

log = logging.getLogger(__name__)


class VersionFollower:
    """One draft of the server and the folder its versions come from."""

    def __init__(
        self,
        loop: EngineLoop,
        root: Path,
        draft: str,
        *,
        serving: int | None = None,
        refused: str = "",
    ):
        self.loop, self.root, self.draft, self.serving = loop, root, draft, serving
        self._refused: tuple[int, Signature] | None = None  # with the files that it had then
        self._last_error = refused

    def misfit(self, version: int) -> str:
        own = self.loop.engine.target.revision
        made_for = stranger(self.root, version, own)
        return (
            f"it was made for target revision {made_for}, this server runs {own}"
            if made_for
            else ""
        )

    def current(self) -> bool:
        """Serve the version that `current` names; True when another version was swapped in."""
        try:
            wanted = latest(self.root)
        except UserError as error:
            return self._log_once(error)
        return wanted is not None and self.serve(wanted)

    def serve(self, wanted: int) -> bool:
        """Serve the version `wanted`; True when another version was swapped in."""
        if wanted == self.serving:
            return False
        seen = wanted, signature(folder_of(self.root, wanted), "**/*")
        if seen == self._refused:
            return False
        try:
            folder = open_version(self.root, wanted)
            if reason := self.misfit(wanted):
                raise UserError(
                    f"version {wanted} stays out: {reason}; let distill learn for this target"
                )
            swap = self.loop.swap(str(folder), str(wanted), draft=self.draft)
        except SwapLate as error:
            return self._log_once(error)  # the next look tries it again
        except UserError as error:
            self._refused = seen
            return self._log_once(error)
        log.info(
            "draft version %d swapped in (%s), pause %.1f ms",
            wanted,
            shown(self.draft),
            1000 * swap.pause_s,
        )
        self.serving, self._refused = wanted, None
        return True

    def _log_once(self, error: UserError) -> bool:
        """Log an error once; the served draft stays."""
        if str(error) != self._last_error:
            log.warning("draft version refused: %s", error)
            self._last_error = str(error)
        return False

    def end(self) -> None:
        """Route no further requests to the draft; those that have it keep it."""
        if self.serving is not None:
            self.loop.retire(self.draft)
            self.serving = None


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
        self.loop, self.root, self.poll_s = loop, Path(root), poll_s
        self._live = VersionFollower(loop, self.root, LIVE, serving=serving, refused=refused)
        self._canary = VersionFollower(loop, self.root, CANARY)
        self._wrong: set[str] = set()  # errors of the latest look,
        self._wrong_before: set[str] = set()  # and of the one before
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftsmith-versions", daemon=True)
        if serving is not None and (reason := self._live.misfit(serving)):
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
        """Look at the folder once; True when another live draft was swapped in."""
        self._wrong_before, self._wrong = self._wrong, set()
        changed = self._live.current()
        self._follow_canary(self._read_canary())
        return changed

    def _read_canary(self) -> Canary | None:
        """Read the trial; a file that cannot be read counts as its end, as it does for
        the learner."""
        try:
            return read_canary(self.root)
        except UserError as error:
            if self._is_new(str(error)):
                log.warning("%s", error)
            return None

    def _is_new(self, wrong: str) -> bool:
        """True for an error that the look before did not meet: each is logged once, and again when
        it comes back."""
        self._wrong.add(wrong)
        return wrong not in self._wrong_before

    def _follow_canary(self, canary: Canary | None) -> None:
        share = 0.0
        if canary is not None:
            self._canary.serve(canary.version)
            # A version that was refused must not get the share of the one before.
            share = canary.share if self._canary.serving == canary.version else 0.0
        self.loop.engine.drafts.canary_share = share
        if share == 0.0:
            self._canary.end()

    def _run(self) -> None:
        # Versions are loaded, checked and made ready on this thread.
        use_device(self.loop.engine.target.device)
        while not self._stopping.wait(self.poll_s):
            try:
                self.look()
            except OSError as error:
                # A shared folder may be away for a moment.
                if self._is_new(str(error)):
                    log.warning("the versions folder cannot be read: %s", error)
            except Exception as error:
                # This thread alone follows the folder: whatever is wrong with this version, the
                # next one has to be seen.
                if self._is_new(repr(error)):
                    log.exception("the versions folder cannot be followed; the served drafts stay")


def watch_versions(
    learning: LearningOptions, loop: EngineLoop, draft: LoadedDraft
) -> VersionWatcher:
    # A swap is one line of the log: no bar for every version that is read.
    transformers_logging.disable_progress_bar()
    assert learning.versions is not None
    return VersionWatcher(
        loop,
        learning.versions,
        poll_s=learning.poll_s,
        serving=draft.number,
        refused=draft.refused,
    ).start()
