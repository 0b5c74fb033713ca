"""Several trainers in one process, of which one computes at a time, pass by pass.

transformers' Trainer owns its loop, so each gets a thread; a thread waits wherever a pass begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Stopped(BaseException):
    """Ends a trainer that waits after another one failed."""


class RandomState(NamedTuple):
    """torch's global generators. Each trainer goes on with its own, as if it were alone."""

    cpu: torch.Tensor
    cuda: list[torch.Tensor]

    @classmethod
    def now(cls) -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(torch.get_rng_state(), cuda)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


class Turns:
    """Order of the trainers 0, 1, ...: the one that began the fewest passes is next, so that those
    behind after a kill catch up, and then all of them are at one batch.

    Args:
        begun: passes that each had begun before.
    """

    def __init__(self, begun: Sequence[int]):
        self.begun = dict(enumerate(begun))  # of those that still train
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def run(self, works: Sequence[Callable[[], object]]) -> None:
        """Runs works[n] as trainer n. The first error ends all of them and is raised."""
        start = RandomState.now()
        with ThreadPoolExecutor(len(works), thread_name_prefix="draftsmith-train") as pool:
            futures = [
                pool.submit(self._work, number, work, start) for number, work in enumerate(works)
            ]
            try:
                wait(futures)
            except BaseException as error:  # an interrupt; threads end where a pass begins
                self._stop(error)
        if self._error is not None:
            raise self._error

    def begin_pass(self, number: int) -> None:
        """Called by trainer `number` where a pass of it begins; returns when its turn comes."""
        state = RandomState.now()
        with self._changed:
            self.begun[number] += 1
            self._changed.notify_all()
        self._await(number)
        state.restore()

    def _work(self, number: int, work: Callable[[], object], start: RandomState) -> None:
        try:
            self._await(number)
            start.restore()
            work()
        except Stopped:
            pass
        except BaseException as error:
            self._stop(error)
        with self._changed:
            del self.begun[number]
            self._changed.notify_all()

    def _await(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._next() == number)
            if self._error is not None:
                raise Stopped

    def _next(self) -> int:
        return min(self.begun, key=lambda number: (self.begun[number], number))

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()


class TakeTurns(TrainerCallback):
    """Lets the other trainers go first wherever a pass begins."""

    def __init__(self, turns: Turns, number: int):
        self.turns, self.number = turns, number

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any
    ) -> None:
        self.turns.begin_pass(self.number)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any
    ) -> None:
        self.turns.begin_pass(self.number)
