"""MTP modules whose block is a plain Llama layer: new ones for every target whose own kind has no
module (`mtp_deepseek.py` has the others), and those that came in MiMo's layout.

The recursion feeds back the module's own state after its norm, as vLLM's MiMo model does. A module
that is stitched into its target reads the target's last state before the final norm, as there; one
that stands beside it the state after it, which engines hand to a draft.

MiMo's layout puts the module into the checkpoint of a target of Qwen2's block. Every other target
gets one in a folder of its own, in the same layout. vLLM builds its block, Qwen2's, from the
target's numbers, with heads of hidden_size / num_attention_heads.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from draftsmith.drafters.draft_shape import (
    Windows,
    check_fits,
    config_dict,
    llama_config,
    new_windows,
    shape_of,
    windows_config,
    windows_in,
)
from draftsmith.drafters.heads.mtp_deepseek import AppendedMtp, DeepMtp
from draftsmith.drafters.heads.mtp_head import MtpHead
from draftsmith.drafters.heads.mtp_layouts import ARCHITECTURE as MIMO_ARCHITECTURE
from draftsmith.drafters.heads.mtp_layouts import (
    LAYOUTS,
    is_native,
    layout_of,
    num_modules,
    read_native,
    text_values,
)
from draftsmith.drafters.init_from_target import fitted_norm
from draftsmith.drafters.layouts.folder import DraftFolder
from draftsmith.drafters.options import MtpOptions
from draftsmith.drafters.target.target import FINAL, Target
from draftsmith.drafters.weights import read_config, read_weights
from draftsmith.errors import UserError
from draftsmith.kernels.products.fast_types import name_of

ARCHITECTURE = "DraftsmithMtp"


class LlamaMtp(MtpHead):
    config: LlamaConfig

    def __init__(
        self, config: LlamaConfig, target: Target, *, tap: int | None = None, windows: Windows = ()
    ):
        """`tap`: FINAL, or raw id L where it is None."""
        super().__init__(
            config,
            target,
            tap=target.num_layers if tap is None else tap,
            norm=partial(LlamaRMSNorm, config.hidden_size, eps=config.rms_norm_eps),
            layer=partial(LlamaDecoderLayer, config, layer_idx=0),
            rotary=LlamaRotaryEmbedding(config),
        )
        self.windows = windows
        # of a module that its target brought along: Qwen2's block has none here
        if config.attention_bias:
            self.layer.self_attn.o_proj.bias = None
        self.to(target.device)

    @classmethod
    def new(
        cls, options: MtpOptions, target: Target, token_counts: torch.Tensor | None
    ) -> LlamaMtp:
        shape = shape_of(target, options)
        tap = None
        if not is_stitched(target):
            shape, tap = shape | block_heads(shape), FINAL
        windows = new_windows(options.window, 1)
        drafter = cls(llama_config(shape), target, tap=tap, windows=windows)
        # The head is frozen, so the module must fit it: outputs of the size of the
        # target's own final states. The layer stays random: begun as the target's last one it
        # learned more slowly (tau 1.40 against 1.62 after 60 steps).
        drafter.norm.weight.data.copy_(fitted_norm(target))
        return drafter

    def portable_config(self) -> dict[str, Any]:
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **config_dict(self.config),
            **windows_config(self.windows),
            "dtype": name_of(self.dtype),
            "tie_word_embeddings": False,
            **({READS_FINAL: True} if self.taps == (FINAL,) else {}),
        }

    @classmethod
    def load(cls, folder: Path, target: Target, values: dict[str, Any]) -> LlamaMtp:
        """`values` are those of the folder's `config.json`."""
        native = is_native(values)
        tensors = read_native(folder, values) if native else read_weights(folder)
        if native:
            # MiMo's counts the layers of the target
            bias = "layer.self_attn.q_proj.bias" in tensors
            values = {**values, "attention_bias": bias, "num_hidden_layers": 1}
        tap = FINAL if values.get(READS_FINAL) else None
        windows = () if native else windows_in(values)
        drafter = cls(llama_config(values), target, tap=tap, windows=windows)
        return drafter.filled(tensors, folder)


class Mtp:
    """The family: modules of a Llama block, or of the target's own kind, one or several."""

    @classmethod
    def matches(cls, draft: DraftFolder, target: Target | None = None) -> bool:
        if (layout := layout_of(draft.config)) is not None:
            values = text_values(draft.config)
            # a smaller model of the target's kind is no module of the target, though it has one
            fits = target is None or values.get("num_hidden_layers") == target.num_layers
            return fits and (not layout.always or layout.is_in(draft.names, values))
        return draft.architecture == MIMO_ARCHITECTURE

    @classmethod
    def create(
        cls,
        options: MtpOptions,
        target: Target,
        *,
        seed: int,
        token_counts: torch.Tensor | None = None,
    ) -> LlamaMtp | AppendedMtp | DeepMtp:
        """`token_counts` is not needed: the head is the target's own."""
        check_modules(options, target)
        if options.modules > 1:
            return DeepMtp.create(options, target, seed=seed)
        if target.config.model_type in LAYOUTS:
            return AppendedMtp.create(options, target, seed=seed)
        return LlamaMtp.create(options, target, seed=seed)

    @classmethod
    def load(cls, folder: Path, target: Target) -> LlamaMtp | AppendedMtp | DeepMtp:
        values = read_config(folder)
        check_shape(text_values(values), target, folder)
        layout, count = layout_of(values), num_modules(text_values(values))
        if count > 1:
            if layout is None or not layout.may_be_deep:
                raise UserError(
                    f"{str(folder)!r} counts {count} MTP modules, of which one is read in this "
                    "layout, applied again and again; use another draft"
                )
            return DeepMtp.load(folder, target, count)
        if layout is not None:
            return AppendedMtp.load(folder, target)
        return LlamaMtp.load(folder, target, values)


def check_modules(options: MtpOptions, target: Target) -> None:
    """Raises `UserError` for several modules, or a window, that no engine would read."""
    layout = LAYOUTS.get(target.config.model_type)
    if layout is not None and options.window is not None:
        raise UserError(
            f"option 'draft.window' is {options.window} and {target.name!r} is a "
            f"{target.config.model_type!r}, whose modules are layers of its own; leave it out, or "
            "train an eagle3 draft"
        )
    if options.modules > 1 and (layout is None or not layout.may_be_deep):
        deep = ", ".join(kind for kind, one in LAYOUTS.items() if one.may_be_deep)
        raise UserError(
            f"option 'draft.modules' is {options.modules} and {target.name!r} is a "
            f"{target.config.model_type!r}; several modules are for {deep}, one for every target"
        )


def check_shape(values: dict[str, Any], target: Target, folder: Path) -> None:
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    check_fits(values, sizes, target, folder)


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
