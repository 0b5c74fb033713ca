"""Swaps of a whole engine: the same step on every worker, and the next only where all agree."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.fleet.vllm.worker import answers_folder

POLL_S = 0.02
# Of a version that is read and packed by a thread: gigabytes from a slow disk.
LOAD_S = 600.0
ANSWER_S = 30.0

Answers = Sequence[dict[str, Any]]


class SwapOutcome(NamedTuple):
    """`pause_ms` is the longest of all workers, None where nothing was copied."""

    ok: bool
    reason: str = ""
    pause_ms: float | None = None
    answers: Answers = ()

    @property
    def is_lasting(self) -> bool:
        """True for a refusal that is about the version, not about the moment."""
        return any(answer.get("lasting") for answer in self.answers)


class SwapClient:
    """Steps of swaps by an engine client's `collective_rpc`."""

    def __init__(self, engine_client: Any, cache: str):
        self.engine_client = engine_client
        parallel = engine_client.vllm_config.parallel_config
        # Behind a load balancer of others each server has engines of its own.
        is_part = getattr(parallel, "local_engines_only", False)
        size = "data_parallel_size_local" if is_part else "data_parallel_size"
        self.engines = int(getattr(parallel, size, 1))
        self.ranks = int(getattr(parallel, "world_size", 1))
        self.answers = answers_folder(cache)
        self._lock = asyncio.Lock()

    async def call(self, step: str, **arguments: str) -> Answers:
        """Answers of all workers to a step of a swap. A worker that does not answer is one that
        refuses."""
        return await self.ask("draftsmith_swap", step, **arguments)

    async def ask(self, method: str, *given: str, **arguments: str) -> Answers:
        """Answers of all workers to one of the plugin's methods."""
        name = uuid.uuid4().hex if self.engines > 1 else ""
        found = await self.engine_client.collective_rpc(
            method, args=(*given, name), kwargs=arguments
        )
        return await self._answers(name) if name else list(found)

    async def _answers(self, call: str) -> Answers:
        """Answers that the workers left in files: those of other engines than the first are not
        returned."""
        wanted, deadline_s = self.engines * self.ranks, time.monotonic() + ANSWER_S
        while True:
            files = sorted(self.answers.glob(f"{call}-*.json"))
            if len(files) >= wanted or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(POLL_S)
        found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in files]
        for path in files:
            path.unlink(missing_ok=True)
        missing = wanted - len(found)
        reason = f"{missing} of {wanted} workers left no answer in {str(self.answers)!r}"
        return found + [{"state": "refused", "reason": reason}] * missing

    async def swap(self, folder: Path, version: str) -> SwapOutcome:
        """Serve a version from a local folder, or keep what is served on every worker."""
        async with self._lock:
            await self.call("stage", folder=str(folder), version=version)
            answers = await self._settled()
            for step in ("trial", "apply"):
                if reason := refusal(answers):
                    return SwapOutcome(False, reason, answers=answers)
                answers = await self.call(step, version=version)
            if reason := refusal(answers):
                return await self._undone(version, reason, answers)
            pauses = [answer["last_swap"]["pause_ms"] for answer in answers]
            await self.call("look")
            looked = await self._settled()
            if all(answer.get("matches") for answer in looked):
                await self.call("keep")
                return SwapOutcome(True, "", max(pauses), looked)
            return await self._undone(version, "what is loaded is not what was staged", looked)

    async def _undone(self, version: str, reason: str, answers: Answers) -> SwapOutcome:
        """One worker could not apply it: those that did go back."""
        await self.call("take_back")
        return SwapOutcome(False, f"version {version}: {reason}", answers=answers)

    async def prepare(self) -> str:
        """Second copies on all workers; a sentence where one cannot have it."""
        async with self._lock:
            reason = refusal(await self.call("prepare"))
            if not reason:
                await self.call("look")
                await self._settled()
            return reason

    async def look(self) -> Answers:
        """Compare what is loaded with what should be; a worker where it differs has no version
        afterwards."""
        async with self._lock:
            await self.call("look")
            return await self._settled()

    async def _settled(self) -> Answers:
        deadline_s = time.monotonic() + LOAD_S
        while True:
            answers = await self.call("status")
            if not any(answer.get("state") == "working" for answer in answers):
                return answers
            if time.monotonic() > deadline_s:
                return [{"state": "refused", "reason": f"nothing is staged after {LOAD_S:.0f} s"}]
            await asyncio.sleep(POLL_S)


def refusal(answers: Answers) -> str:
    """Reason of the first worker that refuses; "" where none does."""
    for answer in answers:
        if answer.get("state", "refused") == "refused":
            return str(answer.get("reason") or "the plugin is not set up in a worker")
    return "" if answers else "no worker answered"
