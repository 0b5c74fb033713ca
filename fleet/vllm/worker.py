"""Methods that the plugin adds to vLLM's `WorkerBase`, for `collective_rpc`; the one slot of
`--worker-extension-cls` stays free.

Each takes the worker first and answers with plain values. Its name begins with `draftsmith_`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftsmith.fleet.vllm.state import WorkerState
from draftsmith.fleet.vllm.swap_methods import draftsmith_swap


def draftsmith_status(worker: Any) -> dict[str, Any]:
    """Rank and version of one worker; `{}` where the plugin is not configured."""
    state: WorkerState | None = getattr(worker, "draftsmith", None)
    if state is None:
        return {}
    return {"rank": worker.rank, "version": state.version, "refused": dict(state.refused)}


METHODS: tuple[Callable[..., Any], ...] = (draftsmith_status, draftsmith_swap)
