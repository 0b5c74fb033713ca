"""Layouts of the MTP modules that targets bring along: names in their checkpoints, and where the
modules differ in what they compute.

MiMo's is read from the target's own folder: engines read it for dense models, and `export` writes
it (`train/export/mtp.py`). transformers leaves the module out when it loads the target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from draftsmith.drafters.layouts.folder import NESTED
from draftsmith.drafters.layouts.fp8 import block_of, dequantised
from draftsmith.drafters.weights import check_finite, safe_files
from draftsmith.errors import UserError


class ShippedLayout(NamedTuple):
    prefix: str  # of the module's tensors; `{layer}`: its number behind the target's layers
    names: dict[str, str]  # theirs, or how theirs begin, -> ours
    needed: str  # a tensor that only the module has
    feeds_normed: bool = True  # drafting on, it reads its state after its norm
    masks_first: bool = True  # the embedding at position 0 is zero
    last_norm: bool = True  # the head reads a normed state
    left_out: tuple[str, ...] = ()  # copies of the target's tables
    always: bool = False  # whether no key of the config counts the modules
    counted_by: str = "num_nextn_predict_layers"  # the key that does, where one does

    def prefix_for(self, config: Mapping[str, Any], index: int = 0) -> str:
        """Prefix of module `index`."""
        return self.prefix.format(layer=(config.get("num_hidden_layers") or 0) + index)

    @property
    def may_be_deep(self) -> bool:
        """True where there may be several modules, each whole, one for each drafted token."""
        return "{layer}" in self.prefix

    def is_in(self, names: Collection[str], config: Mapping[str, Any]) -> bool:
        return self.prefix_for(config) + self.needed in names

    def own_name(self, name: str) -> str | None:
        """Ours of a published name without its prefix; None: left out."""
        if name in self.left_out or name.endswith("rotary_emb.inv_freq"):
            return None
        for theirs, ours in self.names.items():
            if name == theirs or (theirs.endswith(".") and name.startswith(theirs)):
                return ours + name.removeprefix(theirs)
        return f"layer.{name}"

    def published_name(self, name: str) -> str:
        """The inverse."""
        for theirs, ours in self.names.items():
            if name == ours or (ours.endswith(".") and name.startswith(ours)):
                return theirs + name.removeprefix(ours)
        return name.removeprefix("layer.")


# One layer more (DeepSeek-V3, GLM-4.5). Engines differ in what GLM's module reads of itself (SGLang
# and transformers the normed state); these are vLLM's ways, which reads our exports.
APPENDED = ShippedLayout(
    prefix="model.layers.{layer}.",
    names={
        "shared_head.norm.weight": "norm.weight",
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "eh_proj.weight": "eh_proj.weight",
    },
    needed="eh_proj.weight",
    # Copies of the target's tables. vLLM, too, takes the target's own for them.
    left_out=("embed_tokens.weight", "shared_head.head.weight"),
)
QWEN = ShippedLayout(
    prefix="mtp.",
    names={
        "fc.weight": "eh_proj.weight",
        "norm.weight": "norm.weight",
        "pre_fc_norm_embedding.weight": "enorm.weight",
        "pre_fc_norm_hidden.weight": "hnorm.weight",
        "layers.0.": "layer.",
    },
    needed="fc.weight",
    masks_first=False,
    always=True,
)
ERNIE = ShippedLayout(
    prefix="model.mtp_",
    names={
        "linear_proj.0.weight": "eh_proj.weight",
        "emb_norm.0.weight": "enorm.weight",
        "hidden_norm.0.weight": "hnorm.weight",
        "block.0.": "layer.",
    },
    needed="linear_proj.0.weight",
    last_norm=False,
)
# Its projection reads the state first and the embedding second, ours the other way round.
MIMO = ShippedLayout(
    prefix="model.mtp_layers.0.",
    names={
        "input_proj.weight": "eh_proj.weight",
        "token_layernorm.weight": "enorm.weight",
        "hidden_layernorm.weight": "hnorm.weight",
        "final_layernorm.weight": "norm.weight",
    },
    needed="input_proj.weight",
)
SPECULATORS = MIMO._replace(prefix="mtp_layers.0.", masks_first=False, always=True)
QWEN3_5 = QWEN._replace(counted_by="mtp_num_hidden_layers")
LAYOUTS = {
    "deepseek_v3": APPENDED,
    "glm4_moe": APPENDED._replace(feeds_normed=False),
    "glm4_moe_lite": APPENDED._replace(feeds_normed=False),
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
    "ernie4_5_moe": ERNIE,
}


def text_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config, in which multimodal models and speculators nest it."""
    nested = config.get(NESTED) or config.get("text_config") or {}
    return {**config, **nested}


def layout_of(config: Mapping[str, Any]) -> ShippedLayout | None:
    """Layout of the module that a checkpoint with this config may hold."""
    if config.get("speculators_model_type") == "mtp":
        return SPECULATORS
    values = text_values(config)
    found = LAYOUTS.get(values.get("model_type", ""))
    counted = values.get("num_nextn_predict_layers") or values.get("mtp_num_hidden_layers")
    return found if found is not None and (found.always or counted) else None


def num_modules(config: Mapping[str, Any]) -> int:
    """As the config counts them; 1 where it does not."""
    counts = (config.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    return next((int(count) for count in counts if count), 1)


def own_names(
    tensors: Mapping[str, torch.Tensor], layout: ShippedLayout
) -> dict[str, torch.Tensor]:
    """Rename published tensors, without their prefix, to our module's names."""
    named = ((layout.own_name(name), tensor) for name, tensor in tensors.items())
    return {name: tensor for name, tensor in named if name is not None}


ARCHITECTURE = "MiMoForCausalLM"


def is_native(config: Mapping[str, Any]) -> bool:
    return ARCHITECTURE in (config.get("architectures") or ())


def read_native(folder: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The module's tensors under our names; nothing else of the folder, which holds the whole
    target, is read.

    Biases of q, k and v that are all zero are left out: Qwen2 blocks have them, modules trained
    here need not.
    """
    published = module_tensors(folder, config, MIMO.prefix, needed=MIMO.needed)
    tensors = own_names(published, MIMO)
    tensors["eh_proj.weight"] = swapped(tensors["eh_proj.weight"])
    biases = {name for name in tensors if name.endswith("_proj.bias")}
    if not any(bool(tensors[name].any()) for name in biases):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in biases}
    return tensors


def swapped(projection: torch.Tensor) -> torch.Tensor:
    """The weight [H, 2 H] for its two inputs in the other order."""
    return torch.cat(projection.chunk(2, dim=1)[::-1], dim=1)


def module_tensors(
    folder: Path, config: Mapping[str, Any], prefix: str, *, needed: str
) -> dict[str, torch.Tensor]:
    """Those of the module under `prefix`, which their names here lack; FP8 as numbers."""
    tensors: dict[str, torch.Tensor] = {}
    for path in safe_files(folder):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dict
            tensors |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    if needed not in tensors:
        raise UserError(f"{str(folder)!r} holds no {prefix}{needed}; give one with an MTP module")
    tensors = dequantised(tensors, str(folder), block_of(config))
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise UserError(
                f"weight {prefix + name!r} of {str(folder)!r} is stored as "
                f"{str(tensor.dtype).removeprefix('torch.')}; "
                "give a folder whose MTP module is not quantised, or in FP8 with its scales"
            )
    check_finite(tensors, str(folder))
    return tensors
