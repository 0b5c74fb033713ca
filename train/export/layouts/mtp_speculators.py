"""An MTP module as the type `mtp` of the `speculators` library: by itself, with embeddings and head
that the library takes from the target."""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters.heads.mtp_deepseek import stacked_experts
from draftsmith.drafters.heads.mtp_layouts import (
    SPECULATORS,
    layout_of,
    own_names,
    text_values,
)
from draftsmith.drafters.heads.mtp_mimo import module_tensors
from draftsmith.drafters.weights import write_weights
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.eagle3 import speculators_plan
from draftsmith.train.export.layouts.source import Source, check_fits, text_config

# Kinds of targets that the library makes a module's layer of.
KINDS = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
VERSION = "0.6.0"  # the first with the type


def write_speculators(source: Source, out: Path) -> None:
    values, layout = text_values(source.config), layout_of(source.config)
    kind, target = values.get("model_type"), text_config(source.target_config)
    if layout is None or kind not in KINDS:
        raise UserError(
            f"the speculators library has MTP modules of the layers of {', '.join(KINDS)}, and the "
            f"draft's is a layer of {kind!r}; export this mtp draft --to vllm"
        )
    shape = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
    check_fits(source, **{key: values.get(key) for key in shape})
    prefix = layout.prefix_for(values)
    published = module_tensors(source.draft, values, prefix, needed=layout.needed)
    tensors = stacked_experts(own_names(published, layout), str(source.draft))
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": VERSION,
        "dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "transformer_layer_config": target,
        "speculators_config": speculators_plan(source, "mtp"),
    }
    prefix, name_of = SPECULATORS.prefix_for(target), SPECULATORS.published_name
    write_weights(out, config, {prefix + name_of(name): one for name, one in tensors.items()})
