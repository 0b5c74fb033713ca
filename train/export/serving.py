"""Options with which an engine drafts with an exported folder."""

from __future__ import annotations

import json
import shlex
from typing import Any

# What vLLM calls the families it drafts with. P-EAGLE is EAGLE-3 with one more word.
VLLM_METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3"},
    "p-eagle": {"method": "eagle3", "parallel_drafting": True},
    "eagle1": {"method": "eagle"},
    "draft-lm": {"method": "draft_model"},
    "mtp": {"method": "mtp"},
    "medusa": {"method": "medusa"},
    "dflash": {"method": "dflash"},
    "dspark": {"method": "dspark"},
}
# Their drafts are the likeliest tokens, whatever `draft_sample_method` says.
VLLM_GREEDY = frozenset({"medusa"})
SGLANG_ALGORITHMS = {
    "eagle3": "EAGLE3",
    "eagle1": "EAGLE",
    "draft-lm": "STANDALONE",
    "mtp": "NEXTN",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
}
# The families that vLLM reads in the speculators layout.
VLLM_SPECULATORS = ("eagle3", "p-eagle", "dflash", "dspark")
# What llama.cpp calls its ways of drafting.
LLAMA_TYPES = {
    "eagle3": "draft-eagle3",
    "draft-lm": "draft-simple",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}


def vllm_options(
    family: str, target: str, draft: str, k: int, *, stitched: bool = False
) -> dict[str, Any]:
    """vLLM's engine arguments. A draft that is stitched into its target is both models at once;
    transformers makes another tokenizer of the same files for MiMo's model type."""
    speculative = {**VLLM_METHODS[family], "num_speculative_tokens": k}
    if family not in VLLM_GREEDY:
        speculative["draft_sample_method"] = "probabilistic"
    if stitched:
        return {"model": draft, "tokenizer": target, "speculative_config": speculative}
    options = {"model": target, "speculative_config": {**speculative, "model": draft}}
    # vLLM builds the block of an MTP module from the target's config, which must count one.
    return options | ({"hf_overrides": {"num_nextn_predict_layers": 1}} if family == "mtp" else {})


def vllm_command(family: str, target: str, draft: str, k: int, *, stitched: bool = False) -> str:
    options = vllm_options(family, target, draft, k, stitched=stitched)
    flags = [
        f"--{key.replace('_', '-')} "
        + shlex.quote(value if isinstance(value, str) else json.dumps(value))
        for key, value in options.items()
        if key != "model"
    ]
    return " ".join([f"vllm serve {shlex.quote(options['model'])}", *flags])


def sglang_command(family: str, target: str, draft: str, k: int, *, stitched: bool = False) -> str:
    chain = (
        f"--speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens "
        f"{k + 1}"
    )
    model = shlex.quote(draft if stitched else target)
    beside = "" if stitched else f"--speculative-draft-model-path {shlex.quote(draft)} "
    return (
        f"python -m sglang.launch_server --model-path {model} --speculative-algorithm "
        f"{SGLANG_ALGORITHMS[family]} {beside}{chain}"
    )


def llama_command(family: str, target: str, draft: str, k: int) -> str:
    return (
        f"llama-server -m {shlex.quote(target)} -md {shlex.quote(draft)} "
        f"--spec-type {LLAMA_TYPES[family]} --spec-draft-n-max {k}"
    )


def genai_code(target: str, draft: str, k: int) -> str:
    """Lines of Python; both are folders of graphs."""
    return (
        "import openvino_genai\n\n"
        f'draft = openvino_genai.draft_model("{draft}", "CPU")\n'
        f'pipeline = openvino_genai.LLMPipeline("{target}", "CPU", draft_model=draft)\n'
        f'print(pipeline.generate("Hello", max_new_tokens=100, num_assistant_tokens={k}))'
    )
