"""SGLang's reading of MTP modules in the target's folder: Qwen3-Next and Qwen3.5. It skips unknown
tensors, and leaves parameters without one as memory had them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.drafters.weights import read_config, tensor_names
from draftsmith.errors import UserError
from draftsmith.train.export.source import text_config
from tests.engine_readers.sglang import NAME
from tests.engine_readers.understood import Understood
from tests.engine_readers.vllm_mtp_beside import filled_behind, qwen_module

KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def read_mtp(folder: Path, target_config: dict[str, Any]) -> Understood:
    config = read_config(folder)
    kind = text_config(config)["model_type"]
    if kind not in KINDS:
        raise UserError(f"{NAME} would run another MTP module for a {kind!r} than the trained one")
    if any(name.startswith("mtp.layers.1.") for name in tensor_names(folder)):
        raise UserError(f"{NAME} runs one MTP module of a {kind!r}; the layout is wrong")
    # Its class takes any number of modules in the config for one.
    tensors = filled_behind(folder, "mtp.", qwen_module(text_config(config)), engine=NAME)
    return Understood(config, tensors, target=folder)
