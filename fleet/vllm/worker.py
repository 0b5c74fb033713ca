"""Methods that the plugin adds to vLLM's `WorkerBase`, for `collective_rpc`; the one slot of
`--worker-extension-cls` stays free.

Each takes the worker first and answers with plain values. Its name begins with `draftsmith_`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftsmith.fleet.vllm.state import WorkerState
from draftsmith.fleet.vllm.swap_methods import draftsmith_swap, leave_answer, replica_of


def draftsmith_status(worker: Any, call: str = "") -> dict[str, Any]:
    """Rank, replica and version of one worker, under `records` the figures of its recorder where
    there is one (`Recorder.status`); `{}` where the plugin is not configured.

    Args:
        call: as of `draftsmith_swap`
    """
    state: WorkerState | None = getattr(worker, "draftsmith", None)
    if state is None:
        return {}
    status = {
        "rank": worker.rank,
        "replica": replica_of(worker),
        "version": state.version,
        "refused": dict(state.refused),
    }
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
