"""Warning of an engine whose sampled speculation is biased: by its release, unless what it runs is
mended already."""

from __future__ import annotations

import inspect
from typing import Any

from draftsmith.fleet.vllm.expand_kernel import has_wrong_kernel
from draftsmith.fleet.vllm.settings import Settings
from draftsmith.train.export.layouts.vllm_faults import CPU_KERNEL, SHARED_NOISE


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
