"""Entry points of vLLM: `vllm.general_plugins` (`register`, in every process, before a worker is
made) and `vllm.endpoint_plugins` (`endpoints`, in the API server, only where `VLLM_PLUGINS` names
draftsmith).

`register` adds the methods of `worker` to `WorkerBase` and wraps its constructor. A worker whose
engine has settings gets `worker.draftsmith`, a `WorkerState`, as soon as it is made; the recorder
is put in after the engine's warm-up: what this vLLM can do is probed, not its version asked. Where
something is missing the engine serves as it is, and one sentence says so. A worker without settings
stays as it is. Nothing raised here reaches vLLM.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from typing import Any

import torch

from draftsmith.child_process import Child
from draftsmith.fleet.engine import around, engine_name, once, port_of, replica_in
from draftsmith.fleet.recording.messages import WRITER
from draftsmith.fleet.recording.recorder import EngineRecorder
from draftsmith.fleet.recording.seam import kind_of
from draftsmith.fleet.vllm.worker import METHODS, Settings, WorkerState, settings_of
from draftsmith.train.export.vllm_faults import CPU_KERNEL, SHARED_NOISE

# Rules of verification by vLLM's names of them; others keep vLLM's.
RULES = {"standard": "chain"}
# Methods that draft by looking text up: the drafted token is the only one.
LOOKUPS = ("ngram", "ngram_gpu", "suffix")
NEEDED = ("pyarrow", "fsspec")


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
    around(WorkerBase, "__init__", after=_attach)
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        EngineCore = None
    if not hasattr(EngineCore, "set_weight_version"):
        once("this vLLM names no versions of its weights", logging.INFO)
    around(EngineCore, "set_weight_version", after=_weights_named)


def _weights_named(core: Any, weight_version: str) -> None:
    """Let the engine pass the name of the target's weights, which its workers do not get."""
    if settings_of(core.vllm_config) is not None:
        core.collective_rpc("draftsmith_weight_version", args=(weight_version,))


def _attach(worker: Any, *_: Any, **__: Any) -> None:
    settings = settings_of(worker.vllm_config)
    if settings is None:
        return
    worker.draftsmith = WorkerState(settings)
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


def attach(worker: Any, state: WorkerState) -> None:
    """Let the recorder begin after the worker's warm-up and end with the worker."""
    around(worker, "compile_or_warm_up_model", after=lambda *_, **__: begin(worker, state))
    around(worker, "shutdown", before=lambda *_, **__: end(state))


def begin(worker: Any, state: WorkerState) -> None:
    if not state.settings.buffer or state.recorder is not None:
        return
    obstacle = missing(worker)
    if obstacle:
        once(f"nothing is recorded: {obstacle}")
    elif is_recording_rank():
        config, settings = worker.vllm_config, state.settings
        job = job_of(config, state)
        state.recorder = EngineRecorder(
            worker,
            state,
            Child(WRITER, job, share=settings.share),
            most=settings.share,
            max_length=job["max_length"],
        )


def end(state: WorkerState) -> None:
    if state.recorder is not None:
        state.recorder.close()


def missing(worker: Any) -> str:
    """Clause about the first thing that recording needs and this engine lacks; "" for none."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        return f"{absent[0]} is not installed; pip install 'draftsmith[fleet]'"
    if getattr(worker.vllm_config, "speculative_config", None) is None:
        return "this engine drafts nothing; start it with --speculative-config"
    sampler = getattr(worker.model_runner, "rejection_sampler", None)
    if sampler is None or not kind_of(sampler):
        return "the rejection sampler of this vLLM has another call than draftsmith reads"
    calls = ("execute_model", "sample_tokens")
    lacking = [name for name in calls if not callable(getattr(worker, name, None))]
    return f"the workers of this vLLM have no {lacking[0]}" if lacking else ""


def is_recording_rank() -> bool:
    """True in the one worker of an engine whose outputs the engine reads: the first tensor-parallel
    rank of the last pipeline stage. Each data-parallel replica is an engine of its own."""
    try:
        from vllm.distributed import get_pp_group, get_tp_group

        return bool(get_pp_group().is_last_rank and get_tp_group().is_first_rank)
    except (ImportError, AssertionError):
        return True


def job_of(config: Any, state: WorkerState) -> dict[str, Any]:
    """Properties that all records of this engine share, of `fleet.recording.writer.EngineJob`."""
    settings, speculative = state.settings, config.speculative_config
    rule = getattr(speculative, "rejection_sample_method", "standard")
    drawn = getattr(speculative, "draft_sample_method", "greedy")
    lookup = getattr(speculative, "method", "") in LOOKUPS
    return {
        "buffer": settings.buffer,
        "engine": engine_name(
            settings.engine, port_of(sys.argv), replica_in(config.parallel_config)
        ),
        "target": settings.target or str(config.model_config.model),
        "target_revision": settings.target_revision,
        "sampler": "greedy" if lookup else str(drawn),
        "rule": RULES.get(rule, rule),
        "share": settings.share,
        "max_length": config.model_config.max_model_len,
    }


NAME = "vllm.v1.sample.rejection_sampler.expand_kernel"


def fault_of(config: Any, settings: Settings) -> str:
    """Sentence with the mend; "" where nothing is known to be wrong."""
    speculative = getattr(config, "speculative_config", None)
    if speculative is None:
        return ""
    import vllm

    version, method = vllm.__version__, str(speculative.method)
    if getattr(config, "use_v2_model_runner", False):
        is_drawn = getattr(speculative, "draft_sample_method", "greedy") == "probabilistic"
        if is_drawn and SHARED_NOISE.is_in(version) and not has_own_noise():
            return SHARED_NOISE.sentence(method, version)
    elif CPU_KERNEL.is_in(version) and not settings.mend_expand_kernel and has_wrong_kernel():
        return CPU_KERNEL.sentence(method, version)
    return ""


def has_own_noise() -> bool:
    """True where drafts have noise of their own: builds between two releases, and mends by hand."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    return "is_drafting" in inspect.signature(gumbel_sample).parameters


def expand(
    output_ptr: torch.Tensor,
    input_ptr: torch.Tensor,
    cu_num_tokens_ptr: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Value of each request [r], `replace_from` replaced, at each of its tokens [n], in place.

    The parameters have the kernel's own names, by which vLLM passes them."""
    ends = cu_num_tokens_ptr.long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    values = input_ptr.masked_fill(input_ptr == replace_from, replace_to)
    output_ptr.copy_(values.repeat_interleave(counts))


def has_wrong_kernel() -> bool:
    """True on a CPU without Triton; elsewhere vLLM's own kernel is right."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    return current_platform.is_cpu() and not HAS_TRITON


def install() -> None:
    """Register `expand` where it is needed."""
    if not has_wrong_kernel():
        return
    try:
        from vllm.triton_utils.dispatcher import register_kernels

        register_kernels({NAME: expand})
    except (ImportError, ValueError) as error:
        once(f"this vLLM has no registry for {NAME} ({error}); it keeps its own kernel")
        return
    once(f"{NAME} is mended", logging.INFO)
