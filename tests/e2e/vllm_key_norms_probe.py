"""`vllm_probe.py` with DFlash's context keys as vLLM makes them on CUDA: those of each layer normed
by that layer's weights.

vLLM norms the context keys of all layers in one call, with a row of weights for each
(`_normalize_context_k`, line 639 of vllm/model_executor/models/qwen3_dflash.py in 0.32.0). The
kernel of this call for CPUs takes the first row for every layer. On Intel's GPUs it did the same
(https://github.com/vllm-project/vllm-xpu-kernels/issues/573) until it was mended there.
"""

from __future__ import annotations

import sys

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm_probe import main


def normed(model: DFlashQwen3Model, keys: torch.Tensor) -> torch.Tensor:
    """[layers, tokens, kv_heads, D]"""
    result = torch.empty_like(keys)
    for layer, weight in enumerate(model._k_norm_weights):
        ops.rms_norm(result[layer], keys[layer], weight, model._rms_norm_eps)
    return result


if __name__ == "__main__":
    DFlashQwen3Model._normalize_context_k = normed
    main(sys.argv[1])
