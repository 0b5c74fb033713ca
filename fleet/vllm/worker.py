"""Methods that the plugin adds to vLLM's `WorkerBase`, for `collective_rpc`; the one slot of
`--worker-extension-cls` stays free. One of them moves a swap of the draft a step on.

Each takes the worker first and answers with plain values. Its name begins with `draftsmith_`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.config import SECONDS, SHARE, convert, option
from draftsmith.errors import UserError
from draftsmith.files import write_json
from draftsmith.fleet.engine import logger, once, replica_in

STEPS = frozenset({
    "prepare", "stage", "trial", "apply", "look", "keep", "take_back", "status",
})  # fmt: skip


def draftsmith_swap(worker: Any, step: str, call: str = "", **arguments: str) -> dict[str, Any]:
    """One of `STEPS` with its arguments. Every error is an answer: `state` is "refused" and
    `reason` a sentence.

    Args:
        call: name of this call, for workers whose answers `collective_rpc` drops
    """
    state: WorkerState | None = getattr(worker, "draftsmith", None)
    if state is None:
        return {}
    try:
        swaps = swaps_of(worker, state)
        if step not in STEPS:
            raise ValueError(f"{step!r} is no step of a swap; give one of {sorted(STEPS)}")
        found: dict[str, Any] = getattr(swaps, step)(**arguments)
    except Exception as error:
        found = {"state": "refused", "reason": str(error), "version": state.version}
        logger.warning("draftsmith: %s: %s", step, error)
    found |= {"rank": worker.rank}
    leave_answer(worker, state, call, found)
    return found


def swaps_of(worker: Any, state: WorkerState) -> Any:
    if state.swaps is None:
        from draftsmith.fleet.swaps.proposer import SwappedProposer
        from draftsmith.fleet.swaps.swap import Swaps, watch

        swaps = Swaps(SwappedProposer(worker), version=state.settings.version)
        watch(worker, swaps)
        state.swaps = swaps
    return state.swaps


def leave_answer(worker: Any, state: WorkerState, call: str, answer: dict[str, Any]) -> None:
    """Leave a file where several engines stand behind one API server: `collective_rpc` reaches all
    and returns the first one's answers. vLLM shows replicas of a dense target
    a data-parallel size of 1."""
    if not call:
        return
    index = replica_of(worker)
    folder = answers_folder(state.settings.cache)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{call}-{index}-{worker.rank}.json", answer)
    except OSError:
        logger.exception("draftsmith: an answer was not left in %s", folder)


def replica_of(worker: Any) -> int:
    """Number of the data-parallel replica that a worker is of."""
    return replica_in(getattr(worker.vllm_config, "parallel_config", None))


def answers_folder(cache: str) -> Path:
    """Folder that all processes of one user's engines on a machine agree on."""
    root = Path(cache) if cache else Path(tempfile.gettempdir()) / f"draftsmith-{os.getuid()}"
    return root / "answers"


def draftsmith_status(worker: Any, call: str = "") -> dict[str, Any]:
    """Rank, replica and version of one worker, under `records` the figures of its recorder where
    there is one (`Recorder.status`); `{}` where the plugin is not configured.

    Args:
        call: as of `draftsmith_swap`
    """
    state: WorkerState | None = getattr(worker, "draftsmith", None)
    if state is None:
        return {}
    status = {"rank": worker.rank, "replica": replica_of(worker), "version": state.version}
    if state.recorder is not None:
        status["records"] = state.recorder.status()
    leave_answer(worker, state, call, status)
    return status


def draftsmith_weight_version(worker: Any, name: str) -> None:
    """Name of the target's weights in the records from now on."""
    state: WorkerState | None = getattr(worker, "draftsmith", None)
    if state is not None and state.recorder is not None:
        state.recorder.weight_version = name


METHODS: tuple[Callable[..., Any], ...] = (
    draftsmith_status,
    draftsmith_swap,
    draftsmith_weight_version,
)
SECTION = "draftsmith"


@dataclass(frozen=True)
class Settings:
    buffer: str = ""  # folder or fsspec URL of records; "" records nothing
    versions: str = ""  # versions folder or URL to follow; "" follows nothing
    engine: str = ""  # name in records and status files; "" is host name and port
    target: str = ""  # name of the target in records; "" is the model that vLLM was given
    target_revision: str = ""
    version: str = ""  # of the draft that serves at the start; "" where none is known
    share: float = option(1.0, "of new requests that are recorded", limits=SHARE)
    poll_s: float = option(5.0, "between two looks into `versions`", limits=SECONDS)
    cache: str = ""  # local folder of fetched versions; "" is one below the user's cache
    admin: bool = False  # routes that swap drafts and drop cached prefixes, for this machine alone
    floor_drop: float = 0.1  # loss of alpha by which a version is given up without the learner
    floor_rounds: int = 2000  # of each of the two versions that are compared
    mend_expand_kernel: bool = False  # register a right `expand_kernel` on CPUs


def settings_of(vllm_config: Any) -> Settings | None:
    """Settings of an engine; None where it has none or wrong ones, which are logged once and leave
    the engine as it is."""
    additional = getattr(vllm_config, "additional_config", None)
    if not isinstance(additional, Mapping) or SECTION not in additional:
        return None
    try:
        return convert(additional[SECTION], Settings, SECTION)
    except UserError as error:
        once(f"additional_config: {error}; the engine serves without draftsmith")
        return None


@dataclass
class WorkerState:
    """State of the plugin in one worker: `worker.draftsmith`."""

    settings: Settings
    recorder: Any = None
    swaps: Any = None  # `fleet.swaps.swap.Swaps`, made at the first step of a swap

    @property
    def version(self) -> str:
        """Version of the served draft, as records name it."""
        return self.settings.version if self.swaps is None else self.swaps.version
