"""The recorder put into a worker: what this vLLM can do is probed, not its version asked.

Where something is missing the engine serves as it is, and one sentence says so.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from draftsmith.fleet.engine import around, engine_name, once, port_of, replica_in
from draftsmith.fleet.recording.recorder import EngineRecorder
from draftsmith.fleet.recording.seam import kind_of
from draftsmith.fleet.vllm.settings import WorkerState
from draftsmith.fleet.wire.messages import WRITER
from draftsmith.shared_memory.child import Child

# Rules of verification by vLLM's names of them; others keep vLLM's.
RULES = {"standard": "chain"}
# Methods that draft by looking text up: the drafted token is the only one.
LOOKUPS = ("ngram", "ngram_gpu", "suffix")
NEEDED = ("pyarrow", "fsspec")


def attach(worker: Any, state: WorkerState) -> None:
    """Let the recorder begin after the worker's warm-up and end with the worker."""
    around(worker, "compile_or_warm_up_model", after=lambda: begin(worker, state))
    around(worker, "shutdown", before=lambda: end(state))


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
    """Properties that all records of this engine share, of `fleet.wire.requests.EngineJob`."""
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
