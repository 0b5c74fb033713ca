"""Settings and services that all draft tracks of one learner share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from draftsmith.distill.config import DistillConfig
from draftsmith.distill.learn.rehearsal import Rehearsal
from draftsmith.distill.learn.text_states import TextStates
from draftsmith.distill.state import LearnerCounters
from draftsmith.distill.throttle import Throttle
from draftsmith.drafters.target.target import Target


@dataclass(frozen=True)
class LearnerContext:
    config: DistillConfig
    target: Target
    throttle: Throttle
    counters: LearnerCounters
    report: Callable[[str], None]  # prints a line for people
    save: Callable[[], None]  # saves the state of all tracks
    cursor: Callable[[], Mapping[str, int]]  # records read so far, per writer of the buffer
    rehearsal: Rehearsal | None
    states: TextStates  # of the target on the texts that are trained and scored

    @property
    def has_updates_left(self) -> bool:
        most = self.config.max_updates
        return most is None or self.counters.updates < most
