"""A right `expand_kernel` for vLLM on CPUs, through vLLM's own registry of kernels.

The one that vLLM registers there (in the releases of `vllm_faults.CPU_KERNEL`) writes its result
into a copy, so that sampled speculation divides logits by what memory held before. Installed only
where the setting `mend_expand_kernel` says so.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from draftsmith.fleet.log import once

NAME = "vllm.v1.sample.rejection_sampler.expand_kernel"


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
