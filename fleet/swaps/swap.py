"""Swaps of one worker: prepare, stage, trial, apply, look, keep, and a way back.

Every method is called by the engine's thread between two steps and returns at once, with a
dictionary for JSON. `stage` and `look` start a thread; `status` says when it is done. Apply is the
only one that writes into the served draft: one copy of the tensors that changed, at their
addresses. Where the previous weights cannot be put back, drafting stops, and the target serves
alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.errors import UserError, first_line
from draftsmith.fleet.engine import around, logger
from draftsmith.fleet.swaps.checks import DraftRefused
from draftsmith.fleet.swaps.packed import (
    Handle,
    NotSwappable,
    Slots,
    combined,
    exchange,
    handle_digest,
    handles_in,
    tensor_digest,
    tensors_in,
)
from draftsmith.fleet.swaps.proposer import SwappedProposer
from draftsmith.fleet.swaps.staging import Loaded, Staging, derived, trial

LASTING = (UserError, NotSwappable)


class Swaps:
    """Attributes:

    version: of the served draft; "" where it is not known
    digests: of the served draft by slot, as it should be; empty before the first look
    state: "idle", "working", "loaded", "tried", "refused" or "looked"
    reason: sentence of a refusal
    is_lasting: the refusal is about the version, and another try would end the same
    is_asleep: the engine's memory is away, nothing is read or written
    """

    def __init__(self, proposer: SwappedProposer, *, version: str = ""):
        self.proposer = proposer
        self.version = version
        self.staging: Staging | None = None
        self.loaded: Loaded | None = None
        self.applied: Loaded | None = None
        self.digests: dict[str, str] = {}
        self.state, self.reason, self.staged_version = "idle", "", ""
        self.is_lasting = False
        self.matches: bool | None = None
        self.is_asleep = False
        self.last_swap: dict[str, Any] = {}
        self.num_swaps = 0
        self._before: tuple[str, dict[str, str]] = ("", {})
        self._handles_before: dict[str, str] = {}
        self._job: threading.Thread | None = None

    def status(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "digest": combined(self.digests) if self.digests else "",
            "state": "working" if self._is_working() else self.state,
            "staged": self.staged_version,
            "reason": self.reason,
            "lasting": self.state == "refused" and self.is_lasting,
            "matches": self.matches,
            "drafting": not self.proposer.is_stopped,
            "asleep": self.is_asleep,
            "swaps": self.num_swaps,
            "last_swap": self.last_swap,
        }

    def prepare(self) -> dict[str, Any]:
        """Make the second copy and run the trial on it, before traffic."""

        def make() -> None:
            if self.staging is None:
                begun_s = time.perf_counter()
                staging = Staging(self.proposer)
                trial(self.proposer, staging.model)
                self.staging = staging
                logger.info(
                    "draftsmith: made a second draft in %.2f s", time.perf_counter() - begun_s
                )

        return self._step("idle", make)

    def stage(self, folder: str, version: str) -> dict[str, Any]:
        """Start loading a version beside the served one."""
        self._wait_for_nothing()
        self.loaded, self.applied, self.staged_version = None, None, version

        def load() -> None:
            assert self.staging is not None
            self.loaded = self.staging.load(Path(folder), version)

        if self.staging is None:
            return self._refuse("this engine has no second draft to load a version into")
        if self.is_asleep:
            return self._refuse("the engine sleeps")
        return self._start("loaded", load)

    def trial(self, version: str) -> dict[str, Any]:
        """Run the staged draft, and find which packed weights changed."""
        self._wait_for_nothing()

        def run() -> None:
            loaded, staging = self._staged(version), self.staging
            assert staging is not None
            trial(self.proposer, staging.model)
            loaded.derived = derived(self.proposer, staging.model)
            loaded.digests |= self._handle_digests(loaded.slots)
            self._handles_before = self._handle_digests(staging.served())
            loaded.changed += [
                name
                for name, digest in self._handles_before.items()
                if digest != loaded.digests[name]
            ]

        return self._step("tried", run)

    def apply(self, version: str) -> dict[str, Any]:
        """Copy the changed tensors into the served draft."""

        def copy() -> None:
            loaded, staging = self._staged(version), self.staging
            assert staging is not None
            if self.is_asleep:
                raise RuntimeError("the engine sleeps")
            if self.state != "tried":
                raise DraftRefused(f"version {version} was not tried")
            served = staging.served()
            self._before = (self.version, self.digests)
            begun_s = time.perf_counter()
            try:
                put(loaded.changed, loaded.slots, served)
                for tensor, value in loaded.derived:
                    tensor.copy_(value)
            except Exception as error:
                self.applied = loaded
                self._back(first_line(error))
                raise
            pause_ms = 1e3 * (time.perf_counter() - begun_s)
            self.version, self.digests = version, dict(loaded.digests)
            self.applied, self.num_swaps = loaded, self.num_swaps + 1
            self.last_swap = {
                "version": version,
                "pause_ms": pause_ms,
                "ok": True,
                "changed": len(loaded.changed),
                # Of the trial's tokens those that requests had.
                "recent_tokens": self.proposer.recent.num_tokens,
            }

        return self._step("idle", copy)

    def look(self) -> dict[str, Any]:
        """Start a comparison of what is loaded with what should be; `matches` says how it ended."""
        self._wait_for_nothing()
        if self.is_asleep or self.staging is None:
            return self.status()
        self.matches = None
        try:
            served = self.staging.served()
            found = self._handle_digests(served)
        except Exception as error:
            return self._refuse(first_line(error))

        def read() -> None:
            digests = found | {name: tensor_digest(one) for name, one in tensors_in(served).items()}
            self.matches = digests == self.digests if self.digests else None
            if not self.matches:
                self.version = "" if self.digests else self.version
                self.digests = digests

        return self._start("looked", read)

    def keep(self) -> dict[str, Any]:
        """Drop the weights from before the last apply."""
        self.applied = None
        if self.loaded is not None:
            self.loaded.backup.clear()
        return self.status()

    def take_back(self) -> dict[str, Any]:
        """Put back the weights from before the last apply."""
        if self.applied is None:
            return self._refuse("there is nothing to take back")
        self._back(f"version {self.applied.version} was taken back")
        return self.status()

    def stop(self, reason: str) -> dict[str, Any]:
        logger.error("draftsmith: drafting stops: %s", reason)
        self.reason = reason
        self.proposer.stop()
        return self.status()

    def forget(self, reason: str) -> None:
        """Something else wrote into the draft: its version is not known any more."""
        self.version, self.digests, self.reason = "", {}, reason
        self.loaded = self.applied = None
        if self.state in ("loaded", "tried"):
            self.state = "idle"

    def _back(self, reason: str) -> None:
        """The way back of a failed apply. Drafting stops where it fails too."""
        applied, self.applied, self.loaded = self.applied, None, None
        assert applied is not None and self.staging is not None
        self.version, self.digests, self.reason = "", {}, reason
        self.last_swap = {"version": applied.version, "pause_ms": None, "ok": False}
        try:
            served = self.staging.served()
            with torch.no_grad():
                for name, value in applied.backup.items():
                    slot = served[name]
                    assert isinstance(slot, torch.Tensor)
                    slot.data.copy_(value)
            now = self._handle_digests(served)
            for name, handle in handles_in(served).items():
                if now[name] != self._handles_before[name]:
                    exchange(handle, _handle(applied.slots, name))
            if self._handle_digests(served) != self._handles_before:
                raise DraftRefused("packed weights are not those from before the swap")
            self.version, self.digests = self._before
        except Exception as error:
            self.stop(f"the previous weights cannot be put back ({first_line(error)})")

    def _staged(self, version: str) -> Loaded:
        if self.loaded is None or self.loaded.version != version:
            raise DraftRefused(f"version {version} is not staged")
        return self.loaded

    def _handle_digests(self, slots: Slots) -> dict[str, str]:
        return {
            name: handle_digest(handle, self.proposer.dtype)
            for name, handle in handles_in(slots).items()
        }

    def _is_working(self) -> bool:
        return self._job is not None and self._job.is_alive()

    def _wait_for_nothing(self) -> None:
        if self._is_working():
            raise RuntimeError(f"version {self.staged_version} is still being worked on")

    def _step(self, state: str, work: Callable[[], None]) -> dict[str, Any]:
        try:
            with torch.no_grad():
                work()
        except Exception as error:
            if not isinstance(error, LASTING):
                logger.exception("draftsmith: a step of a swap failed")
            return self._refuse(first_line(error), is_lasting=isinstance(error, LASTING))
        self.state, self.reason = state, ""
        return self.status()

    def _start(self, state: str, work: Callable[[], None]) -> dict[str, Any]:
        self.state, self.reason = "working", ""
        self._job = threading.Thread(
            target=self._step, args=(state, work), name="draftsmith-swap", daemon=True
        )
        self._job.start()
        return self.status()

    def _refuse(self, reason: str, *, is_lasting: bool = False) -> dict[str, Any]:
        self.state, self.reason, self.loaded = "refused", reason, None
        self.is_lasting = is_lasting
        return self.status()


def put(names: list[str], staged: Slots, served: Slots) -> None:
    """Copy tensors and exchange the addresses of packed weights, by name."""
    with torch.no_grad():
        for name in names:
            slot, new = served[name], staged[name]
            if isinstance(slot, torch.Tensor):
                assert isinstance(new, torch.Tensor)
                slot.data.copy_(new)
            else:
                exchange(slot, _handle(staged, name))


def _handle(slots: Slots, name: str) -> Handle:
    slot = slots[name]
    assert isinstance(slot, Handle)
    return slot


def watch(worker: Any, swaps: Swaps) -> None:
    """Wraps methods of one worker by which the version is lost, or its memory goes away."""

    def updated(*_: Any, **__: Any) -> None:
        swaps.forget("vLLM's own weight update wrote into the draft")

    def sleeps(*_: Any, **__: Any) -> None:
        swaps.is_asleep = True

    def wakes(*_: Any, **__: Any) -> None:
        swaps.is_asleep = False
        swaps.forget("the engine slept")

    for name in ("start_draft_weight_update", "finish_weight_update"):
        around(worker, name, after=updated, failed=updated)
    around(worker, "sleep", before=sleeps)
    around(worker, "wake_up", after=wakes)
