"""P-EAGLE: EAGLE-3's portable layout with the state that stands in the slots to be drafted. vLLM
reads it (served with `"method": "eagle3", "parallel_drafting": true`), in the `speculators` layout
too."""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters.weights import read_weights, write_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts import eagle3
from draftsmith.train.export.layouts.source import Source


def write_vllm(source: Source, out: Path) -> None:
    check(source)
    tensors = {
        eagle3.portable_name(name): tensor for name, tensor in read_weights(source.draft).items()
    }
    write_weights(out, source.config, tensors)


def write_speculators(source: Source, out: Path) -> None:
    """Started as `vllm serve OUT`: the target is named inside."""
    check(source)
    config = eagle3.speculators_config(source)
    config |= {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "mask_token_id": source.config["mask_token_id"],
        "parallel_drafting": True,
        "speculators_config": config["speculators_config"] | {"algorithm": "peagle"},
    }
    write_weights(out, config, eagle3.speculators_tensors(source.draft))


def check(source: Source) -> None:
    mask_token, size = source.config.get("mask_token_id"), source.config.get("vocab_size")
    if mask_token is None or not 0 <= mask_token < size:
        raise UserError(
            f"the draft has mask_token_id={mask_token}, which is no id of its {size} tokens; save "
            "the draft again"
        )
    taps = source.config["num_aux_hidden_states"] * source.config["target_hidden_size"]
    eagle3.check(source, more={"mask_hidden": (1, taps)})
