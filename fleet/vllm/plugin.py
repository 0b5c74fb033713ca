"""Entry points of vLLM: `vllm.general_plugins` (`register`, in every process, before a worker is
made) and `vllm.endpoint_plugins` (`endpoints`, in the API server, only where `VLLM_PLUGINS` names
draftsmith).

`register` adds the methods of `worker` to `WorkerBase` and wraps its constructor. A worker whose
engine has settings gets `worker.draftsmith`, a `WorkerState`, as soon as it is made; the recorder
is put in after the engine's warm-up. A worker without settings stays as it is. Nothing raised here
reaches vLLM.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from draftsmith.fleet.engine import logger, once
from draftsmith.fleet.vllm.attach import attach
from draftsmith.fleet.vllm.faults import fault_of, install
from draftsmith.fleet.vllm.settings import WorkerState, settings_of
from draftsmith.fleet.vllm.worker import METHODS


def register() -> None:
    """Extend vLLM's worker class; repeated calls change nothing."""
    try:
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError as error:
        once(f"this vLLM has no worker class that can be extended ({error}); it serves untouched")
        return
    for method in METHODS:
        if not hasattr(WorkerBase, method.__name__):
            setattr(WorkerBase, method.__name__, method)
    if not hasattr(WorkerBase.__init__, "draftsmith"):
        setattr(WorkerBase, "__init__", _extended(WorkerBase.__init__))  # noqa: B010
    try:
        _follow_weight_versions()
    except (ImportError, AttributeError) as error:
        once(f"this vLLM names no versions of its weights ({error})", logging.INFO)


def _follow_weight_versions() -> None:
    """Let the engine pass the name of the target's weights, which its workers do not get."""
    from vllm.v1.engine.core import EngineCore

    inner = EngineCore.set_weight_version
    if hasattr(inner, "draftsmith"):
        return

    @functools.wraps(inner)
    def extended(core: Any, weight_version: str) -> Any:
        result = inner(core, weight_version)
        try:
            if settings_of(core.vllm_config) is not None:
                core.collective_rpc("draftsmith_weight_version", args=(weight_version,))
        except Exception:
            logger.exception("draftsmith: records keep the last name of the weights")
        return result

    extended.draftsmith = True  # type: ignore[attr-defined]
    EngineCore.set_weight_version = extended


def _extended(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def extended(worker: Any, *args: Any, **kwargs: Any) -> None:
        construct(worker, *args, **kwargs)
        try:
            _attach(worker)
        except Exception:
            logger.exception("draftsmith: a worker is left as it is")

    extended.draftsmith = True  # type: ignore[attr-defined]
    return extended


def _attach(worker: Any) -> None:
    settings = settings_of(worker.vllm_config)
    if settings is None:
        return
    worker.draftsmith = WorkerState(settings, settings.version)
    if settings.mend_expand_kernel:
        install()
    if sentence := fault_of(worker.vllm_config, settings):
        once(sentence)
    attach(worker, worker.draftsmith)
    once(f"active in worker {worker.rank} with {settings}", logging.INFO)


def endpoints() -> Any:
    """Endpoint plugin, imported in API servers alone."""
    from draftsmith.fleet.vllm.endpoint import Endpoints

    return Endpoints()
