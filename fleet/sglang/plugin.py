"""Entry point of SGLang's `sglang.srt.plugins`: a hook around `eagle_sample`, the one verification
of EAGLE, EAGLE-3, NEXTN, STANDALONE and n-gram drafts.

Settings stand in the environment, which every process of an engine has:
`DRAFTSMITH_SGLANG='{"buffer": "s3://bucket/buffer", "target": "org/target"}'`, of the fields of
`fleet/vllm/settings.py`. Without them nothing is hooked. The original is called once whatever
happens here, and nothing raised here reaches SGLang.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from draftsmith.fleet.log import logger, once
from draftsmith.fleet.names import engine_name
from draftsmith.fleet.sglang.recorder import Recorder
from draftsmith.fleet.vllm.settings import Settings, wrong
from draftsmith.fleet.wire.child import Child

VARIABLE = "DRAFTSMITH_SGLANG"
TARGET = "sglang.srt.speculative.eagle_utils.eagle_sample"
# Parameters that are read; what a later SGLang adds behind them is passed on.
READ = ["verify_input", "batch", "logits_output"]
MAX_LENGTH = 1 << 20


def register() -> None:
    """Called by SGLang in every process, before its engine starts."""
    settings = settings_of(os.environ)
    if settings is None or not settings.buffer:
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        once(f"this SGLang has no hooks ({error}); it serves without draftsmith")
        return
    HookRegistry.register(TARGET, hook_of(settings), HookType.AROUND)


def settings_of(environment: Mapping[str, str]) -> Settings | None:
    """None where there are none, or wrong ones, which are logged once."""
    text = environment.get(VARIABLE)
    if not text:
        return None
    try:
        given = json.loads(text)
    except ValueError as error:
        once(f"{VARIABLE} is no JSON ({error}); the engine serves without draftsmith")
        return None
    if sentence := wrong(given, VARIABLE):
        once(f"{sentence}; the engine serves without draftsmith")
        return None
    return Settings(**given)


def hook_of(settings: Settings) -> Callable[..., Any]:
    """Around hook: `hook(original, *args, **kwargs)`."""
    recorders: list[Recorder | None] = []

    def eagle_sample(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder, step = None, None
        try:
            if not recorders:
                recorders.append(begin(settings, original))
            (recorder,) = recorders
            if recorder is not None:
                given = inspect.signature(original).bind(*args, **kwargs).arguments
                step = recorder.before(*(given[name] for name in READ))
        except Exception:
            failed(recorder)
        result = original(*args, **kwargs)
        try:
            if recorder is not None and step is not None:
                recorder.after(step, *result)
        except Exception:
            failed(recorder)
        return result

    return eagle_sample


def failed(recorder: Recorder | None) -> None:
    logger.debug("draftsmith: a verification is not recorded", exc_info=True)
    if recorder is not None:
        recorder.drop_all()


def begin(settings: Settings, original: Callable[..., Any]) -> Recorder | None:
    """Recorder of this process; None where it records nothing."""
    if list(inspect.signature(original).parameters)[: len(READ)] != READ:
        once("nothing is recorded: eagle_sample of this SGLang has another call than is read here")
        return None
    facts = engine_facts()
    if facts["rank"] != 0:
        return None
    job = {
        "buffer": settings.buffer,
        "engine": engine_name(settings.engine, facts["port"], facts["replica"]),
        "target": settings.target or facts["target"],
        "target_revision": settings.target_revision,
        "sampler": facts["sampler"],
        "rule": facts["rule"],
        "share": settings.share,
        "max_length": MAX_LENGTH,
    }
    once(f"records the verifications of SGLang with {settings}", 20)
    child = Child(job, share=settings.share)
    return Recorder(child, version=settings.version, most=settings.share)


def engine_facts() -> dict[str, Any]:
    """Rank among those that share requests, replica, port, target, sampler and rule of
    verification, by SGLang's own context."""
    import torch

    from sglang.srt.runtime_context import get_parallel, get_server_args, get_spec

    parallel, server, spec = get_parallel(), get_server_args(), get_spec()
    draws = bool(spec.speculative_use_rejection_sampling)
    thresholds = (spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc)
    rule = "tree"
    if draws:
        rule = "block" if getattr(spec, "speculative_use_block_verification", False) else "chain"
    elif min(thresholds) < 1:
        rule = "typical"
    elif not torch.cuda.is_available() or torch.version.hip is not None:
        rule = "argmax"  # whatever the temperature is
    return {
        "rank": int(parallel.attn_tp_rank),
        "replica": int(getattr(parallel, "attn_dp_rank", 0) or 0),
        "port": int(server.port),
        "target": str(server.model_path),
        "sampler": "probabilistic" if draws else "target-only",
        "rule": rule,
    }
