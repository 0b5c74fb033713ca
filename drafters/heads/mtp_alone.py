"""A new MTP module for targets whose own checkpoint cannot hold one.

MiMo's layout puts the module into the checkpoint of a target of Qwen2's block. Every other target
gets one in a folder of its own, in the same layout. vLLM hands it the state that the target's head
multiplies, and builds its block, Qwen2's, from the target's numbers, with heads of hidden_size /
num_attention_heads.
"""

from __future__ import annotations

from typing import Any

from draftsmith.drafters.target.target import Target

# Same block as Qwen2 up to the biases. Others differ in what the tensors mean (Gemma's norms), not
# only in which there are.
STITCHED = ("llama", "mistral", "qwen2", "mimo")
# Key of a module's config: it reads the state that the head multiplies.
READS_FINAL = "reads_final_state"


def is_stitched(target: Target) -> bool:
    config = target.config.to_dict()
    if config["model_type"] not in STITCHED or uses_window(config):
        return False
    width = config["hidden_size"] // config["num_attention_heads"]
    return (config.get("head_dim") or width) == width and not config.get("mlp_bias")


def uses_window(config: dict[str, Any]) -> bool:
    windowed = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    return windowed or "sliding_attention" in (config.get("layer_types") or ())


def block_heads(shape: dict[str, Any]) -> dict[str, Any]:
    """Width of the heads of an engine's block, which has as many as the target."""
    width = shape["hidden_size"] // shape["num_attention_heads"]
    return {"head_dim": max(2, width - width % 2)}
