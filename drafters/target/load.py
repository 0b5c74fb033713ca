"""Loading of configurations, tokenizers and models by transformers, from a folder or Hub id;
nothing else loads them.

Such a folder may bring Python code of its own (`auto_map` in its JSON files). transformers asks on
the terminal where a call leaves `trust_remote_code` out, so every loader here takes it and passes
it on. Off, that code is never run: a class that transformers itself has is loaded in its place, and
what has none is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig

from draftsmith.drafters.target.attention import register
from draftsmith.drafters.target.quantised import check_quantisation, quantisation
from draftsmith.errors import UserError


def load_model(
    path: str | Path,
    *,
    trust_remote_code: bool,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    shards: int = 1,
) -> PreTrainedModel:
    """A causal LM in evaluation mode with our attention. `dtype` "auto" is the checkpoint's own.
    Raises `UserError`."""
    plan: dict[str, Any] = {}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        check_quantisation(path, config)
        if shards > 1:
            plan["distributed_config"] = DistributedConfig(tp_size=shards)
        elif quantisation(config) and torch.device(device).type != "cpu":
            # Libraries choose their kernels by where the weights are loaded.
            plan["device_map"] = {"": device}
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            attn_implementation=register(),
            output_loading_info=True,
            **plan,
        )
    except KeyError as error:
        # Families with attention classes of their own, by name (Falcon), have no entry for ours.
        raise UserError(
            f"model {str(path)!r} cannot be served: it knows no attention named {error}; use "
            "another model"
        ) from error
    except (UserError, torch.OutOfMemoryError):
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        _check_remote_code(path, error)
        raise UserError(
            f"model {str(path)!r} cannot be loaded ({_first_line(error)}); check the path or Hub id"
        ) from error
    if missing := sorted(report["missing_keys"]):
        # transformers would go on with random numbers in their place.
        raise UserError(
            f"model {str(path)!r} lacks {len(missing)} of its weights, {missing[0]!r} for one; "
            "restore its files"
        )
    return model.to(device).eval()


def load_tokenizer(path: str | Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Raises `UserError` for a folder or Hub id without a tokenizer that can be read."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        _check_remote_code(path, error)
        raise UserError(
            f"no tokenizer can be loaded from {str(path)!r} ({_first_line(error)}); add its files"
        ) from error


def load_config(path: str | Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The model's configuration without its weights. Raises `UserError`."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        _check_remote_code(path, error)
        raise UserError(
            f"model {str(path)!r} has no readable config.json ({_first_line(error)}); check the "
            "path or Hub id"
        ) from error


def build_model(
    config: PreTrainedConfig, *, trust_remote_code: bool, **options: Any
) -> PreTrainedModel:
    """A causal LM of `config` whose weights are yet to be filled in; `options` as transformers'
    `from_config` takes them."""
    return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)


def _check_remote_code(path: str | Path, error: Exception) -> None:
    """A refusal of its own where transformers stops at code that may not run."""
    if "trust_remote_code=True" in str(error):
        raise UserError(
            f"{str(path)!r} needs Python code of its own (auto_map) to be run; read that code, "
            "then give "
            "--trust-remote-code (trust_remote_code=True in Python), or use another model"
        ) from error


def _first_line(error: Exception) -> str:
    return (
        str(error).strip().splitlines()[0].rstrip(".")
        if str(error).strip()
        else type(error).__name__
    )
