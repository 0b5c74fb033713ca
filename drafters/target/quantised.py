"""Quantised weights: the libraries that they need, and their values as floating-point numbers.

A quantised module stores codes, and every library stores them in another way. What its forward
makes of the unit vectors is its weight, whichever library made it.
"""

from __future__ import annotations

import functools
import itertools
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from draftsmith.errors import UserError

log = logging.getLogger(__name__)

# `quant_method` of config.json -> modules that transformers loads it with, by the names that pip
# installs them under.
LIBRARIES: dict[str, dict[str, str]] = {
    "aqlm": {"aqlm": "aqlm"},
    "auto-round": {"auto_round": "auto-round"},
    "awq": {"gptqmodel": "gptqmodel"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "gptq": {"optimum": "optimum", "gptqmodel": "gptqmodel"},
    "hqq": {"hqq": "hqq"},
    "quanto": {"optimum.quanto": "optimum-quanto"},
    "quark": {"quark": "amd-quark"},
    "spqr": {"spqr_quant": "spqr_quant"},
    "torchao": {"torchao": "torchao"},
    "vptq": {"vptq": "vptq"},
}
NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_quantisation(path: str | Path, config: PreTrainedConfig) -> None:
    """Raises `UserError` where the model's weights are quantised by a library that is missing, or
    so that a text's logits depend on its batch."""
    method = quantisation(config)
    missing = [pip for module, pip in LIBRARIES.get(method, {}).items() if not _is_there(module)]
    if missing:
        raise UserError(
            f"model {str(path)!r} is quantised by {method!r}, which needs {' and '.join(missing)}; "
            f"run pip install {' '.join(missing)}, or use another checkpoint"
        )
    threshold = _settings(config).get("llm_int8_threshold", 6.0)
    if _settings(config).get("load_in_8bit") and threshold > 0:
        # LLM.int8() takes the columns in which any token of the pass is an outlier out of int8.
        raise UserError(
            f"model {str(path)!r} is quantised by LLM.int8() with outliers above {threshold}, "
            "which are looked for in all texts of a pass together, so no batch gives what a text "
            "gives alone; set llm_int8_threshold to 0.0 in its config.json, or use another one"
        )


def quantisation(config: PreTrainedConfig) -> str:
    """The method that the checkpoint is quantised by; "" for plain weights."""
    settings = _settings(config)
    method = settings.get("quant_method", "unknown" if settings else "")
    return str(getattr(method, "value", method))


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Values of `quantization_config` in config.json, also where a multimodal model has it in its
    language part."""
    for part in (config, config.get_text_config()):
        found: Any = getattr(part, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, dict) else found.to_dict()
    return {}


def has_numbers(tensor: torch.Tensor | None) -> bool:
    """True for a floating-point tensor whose values are what it stands for, not codes."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter, DTensor)
    return plain and tensor is not None and tensor.dtype in NUMBERS


def numbers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Floating-point parameters and buffers of a module by name, and the weights that its
    quantised projections stand for."""
    # Not from `state_dict`, for which bitsandbytes repacks its codes in place: the layer gives
    # other numbers afterwards.
    held = itertools.chain(module.named_parameters(remove_duplicate=False), module.named_buffers())
    state = {name: own.detach() for name, own in held if has_numbers(own)}
    place = next(iter(state.values()), torch.empty(0))
    for name, part in module.named_modules():
        if not has_numbers(getattr(part, "weight", None)):
            weight = effective_weight(part, like=place)
            if weight is not None:
                state[f"{name}.weight"] = weight
    return state


def first_values(tensor: torch.Tensor, count: int = 64) -> torch.Tensor:
    """The first `count` values, or codes, of a parameter. Libraries' own kinds of tensors cannot be
    reshaped, but say what they stand for."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) and hasattr(tensor, "dequantize"):
        tensor = tensor.dequantize()
    return tensor.flatten()[:count]


@torch.no_grad()
def effective_weight(module: nn.Module, *, like: torch.Tensor) -> torch.Tensor | None:
    """[out, in], what a linear module multiplies its input by, for an input of the dtype and
    device of `like`; None for other modules and where no kernel runs."""
    if has_numbers(weight := getattr(module, "weight", None)):
        return weight
    size = getattr(module, "in_features", None)
    if not isinstance(size, int):
        return None
    rows = torch.eye(size, dtype=like.dtype, device=like.device)
    try:
        return (module(rows) - module(rows[:1] * 0)).T.contiguous()
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
        _warn(type(module).__name__, str(error))
        return None


@functools.cache
def _warn(kind: str, error: str) -> None:
    """Says once that a kind of module keeps its weights to itself."""
    log.warning("weights of a %s cannot be read (%s); a new draft has its own", kind, error)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
