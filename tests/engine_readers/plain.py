"""Layouts that engines and libraries read as they are: whole models, the original Medusa, IBM's MLP
speculator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.drafters.weights import read_config, read_weights
from draftsmith.train.export.source import text_config
from tests.engine_readers.understood import Understood, filled


def read_model(folder: Path, target_config: dict[str, Any]) -> Path:
    """A causal LM, loaded by transformers here as in every engine."""
    own, target = (
        text_config(read_config(folder))["vocab_size"],
        text_config(target_config)["vocab_size"],
    )
    assert own == target
    return folder


def read_medusa(folder: Path, target_config: dict[str, Any]) -> Understood:
    """A table for every head, blocks with biases."""
    config, target = read_config(folder), text_config(target_config)
    hidden, layers = target["hidden_size"], config["medusa_num_layers"]
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config["medusa_num_heads"]):
        for layer in range(layers):
            shapes |= {
                f"{head}.{layer}.linear.weight": (hidden, hidden),
                f"{head}.{layer}.linear.bias": (hidden,),
            }
        shapes[f"{head}.{layers}.weight"] = (target["vocab_size"], hidden)
    loaded = filled("Medusa's own loader", read_weights(folder), shapes)
    own = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden,
        "vocab_size": target["vocab_size"],
    }
    own |= {"num_heads": config["medusa_num_heads"], "num_hidden_layers": layers}
    tensors = {}
    for name, tensor in loaded.items():
        number, depth, *rest = name.split(".")
        tensors[
            f"lm_heads.{number}.weight"
            if int(depth) == layers
            else f"blocks.{number}.layers.{depth}.{rest[-1]}"
        ] = tensor
    return Understood(own, tensors)


def read_mlp(folder: Path, target_config: dict[str, Any]) -> Understood:
    """fms builds every depth, tied or not, and leaves what it does not find at random values."""
    config = read_config(folder)
    outer, inner, vocab = (
        config["emb_dim"],
        config.get("inner_dim") or config["emb_dim"],
        config["vocab_size"],
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for depth in range(config["n_predict"]):
        shapes |= {
            f"speculator.emb.{depth}.weight": (vocab, inner),
            f"speculator.proj.{depth}.weight": (inner, outer if depth == 0 else inner),
            f"speculator.head.{depth}.weight": (vocab, inner),
            f"speculator.ln.{depth}.weight": (inner,),
            f"speculator.ln.{depth}.bias": (inner,),
        }
    # Untied, so that each depth keeps what was read for it.
    return Understood({**config, "tie_weights": False}, filled("fms", read_weights(folder), shapes))
