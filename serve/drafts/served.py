"""One of the drafts that an engine serves, with its own failures and pauses. Torch-free but for
the drafter."""

from __future__ import annotations

import logging

from draftsmith.drafters.interface import ServingDrafter
from draftsmith.serve.requests.request import shown

log = logging.getLogger(__name__)

PROBE = 4  # a draft in quarantine drafts in one of so many rounds: enough to measure it
LONGEST_PAUSE = 256  # rounds without drafting after a drafter has failed again and again


class ServedDraft:
    def __init__(self, name: str, drafter: ServingDrafter):
        self.name, self.drafter = name, drafter
        # Made for other weights of the target, until it is measured to pay with these.
        self.quarantined = False
        self.retired = False  # goes when its last request has ended
        self._failures = 0
        self._pause = 0

    @property
    def takes_requests(self) -> bool:
        return self._pause == 0 and not self.retired

    def take_turn(self) -> bool:
        """True when the draft may draft in this round. Counts down the pause that follows failures,
        or a turn in quarantine."""
        if self._pause > 0:
            self._pause -= 1
            return False
        if self.quarantined:
            self._pause = PROBE - 1
        return True

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, cause: str, error: object) -> None:
        self._failures += 1
        self._pause = min(2 ** (self._failures - 1), LONGEST_PAUSE) - 1
        if self._pause < LONGEST_PAUSE - 1 or self._failures % 16 == 0:
            log.warning(
                "draft %s failed (%s: %s); it rests for %d rounds",
                shown(self.name),
                cause,
                error,
                self._pause,
            )
