"""Warning of an engine whose sampled speculation is biased: by its release, unless what it runs is
mended already; and a right `expand_kernel` for vLLM on CPUs, through its own registry of kernels.

The one that vLLM registers there (in the releases of `vllm_faults.CPU_KERNEL`) writes its result
into a copy, so that sampled speculation divides logits by what memory held before. Installed only
where the setting `mend_expand_kernel` says so.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from draftsmith.fleet.engine import once
from draftsmith.fleet.vllm.settings import Settings
from draftsmith.train.export.layouts.vllm_faults import CPU_KERNEL, SHARED_NOISE

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
