"""Stop of one request's drafting by its own acceptance, and trials that resume it. Torch-free.

Everything here depends on finished rounds of the same request, and no later round draws their noise
again. So k is still chosen before anything of the round is drawn (invariant 4).
"""

from __future__ import annotations

from dataclasses import dataclass

FEWEST = 8  # drafting rounds before a stop
MEMORY = 16  # drafting rounds that the mean goes over
TRIAL = 4  # drafting rounds that decide on resuming
RESUMES = 1.25  # factor on the bound: what is resumed must not be stopped again at once
SHORTEST, LONGEST = 16, 256  # passes without drafts before a trial


@dataclass(slots=True)
class Stopping:
    """Accepted tokens per drafting round of one request, held against a bound.

    Args:
        below: mean of accepted tokens per drafting round below which drafting stops.
        longest: most passes without drafts before a trial.
    """

    below: float
    longest: int = LONGEST
    stopped: bool = False
    mean: float = 0.0
    rounds: int = 0  # drafting rounds of `mean`
    passes_left: int = 0  # without drafts, before the next trial
    pause: int = SHORTEST  # passes without drafts after a trial that fails, before doubling
    num_stops: int = 0
    num_stopped_passes: int = 0

    @property
    def drafts(self) -> bool:
        """True when the next round may draft: nothing is stopped, or a trial is due."""
        return self.passes_left == 0

    def observe(self, offered: int, accepted: int) -> bool:
        """Count a target pass of the request; True when it stops the drafting."""
        if not self.drafts:
            self.passes_left -= 1
            self.num_stopped_passes += 1
            return False
        if offered == 0:
            return False  # the control chose so, or the draft had nothing
        self.rounds += 1
        self.mean += (accepted - self.mean) / min(self.rounds, MEMORY)
        if self.stopped:
            if self.rounds == TRIAL:
                self._end_trial()
        elif self.rounds >= FEWEST and self.mean < self.below:
            self.stopped = True
            self.num_stops += 1
            self._wait(SHORTEST)
            return True
        return False

    def restart(self) -> None:
        """Draft again, as a new request would."""
        self.stopped, self.mean, self.rounds, self.passes_left = False, 0.0, 0, 0

    def _end_trial(self) -> None:
        if self.mean >= RESUMES * self.below:
            self.stopped = False
        else:
            self._wait(2 * self.pause)

    def _wait(self, passes: int) -> None:
        self.pause = max(1, min(passes, self.longest))
        self.passes_left, self.mean, self.rounds = self.pause, 0.0, 0
