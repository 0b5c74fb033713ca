"""An MTP module that its target brought along as one more decoder layer: DeepSeek-V3, GLM-4.5 to
4.7.

Its block is a layer of the target's own class, with experts and latent attention where those have
them. The state it reads is the one that the target's head multiplies, after the final norm. It is
saved under the names it was published with.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftsmith.drafters.heads.mtp_head import MtpHead
from draftsmith.drafters.heads.mtp_mimo import module_tensors
from draftsmith.drafters.target.attention import register
from draftsmith.drafters.target.probe import AttentionShapes, LayerShape
from draftsmith.drafters.target.target import FINAL, Target
from draftsmith.drafters.weights import load_into, read_config, write_weights
from draftsmith.errors import UserError
from draftsmith.kernels.attention.pool import PagedPool

if TYPE_CHECKING:
    from typing_extensions import Self


# Whether the module, drafting on, reads its state after its norm. Engines differ for GLM (SGLang
# and transformers read the normed one); these are vLLM's ways, which reads our exports.
FEEDS_NORMED = {"deepseek_v3": True, "glm4_moe": False, "glm4_moe_lite": False}
# Copies of the target's tables. vLLM, too, takes the target's own for them.
SHARED = ("embed_tokens.weight", "shared_head.head.weight")
OURS = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
NORM, THEIR_NORM, LAYER = "norm.weight", "shared_head.norm.weight", "layer."
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def is_appended(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in FEEDS_NORMED and bool(config.get("num_nextn_predict_layers"))


def prefix_of(config: Mapping[str, Any]) -> str:
    return f"model.layers.{config['num_hidden_layers']}."


def own_names(tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """Rename published tensors, without their prefix, to our module's names."""
    renamed = {}
    for name, tensor in stacked_experts(tensors, where).items():
        if name == THEIR_NORM:
            renamed[NORM] = tensor
        elif name not in SHARED and not name.endswith("rotary_emb.inv_freq"):
            renamed[name if name in OURS else LAYER + name] = tensor
    return renamed


def published_names(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The inverse, with `prefix`; what is shared with the target is not among them."""
    theirs = {
        THEIR_NORM if name == NORM else name.removeprefix(LAYER): tensor
        for name, tensor in tensors.items()
    }
    return {prefix + name: tensor for name, tensor in single_experts(theirs).items()}


def stacked_experts(tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """Each expert's gate and up [I, H] and down [H, I] -> [E, 2 I, H] and [E, H, I]; a dense layer
    as it is."""
    stacked = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    numbers = {int(found[1]) for name in tensors if (found := EXPERT.fullmatch(name))}
    if not numbers:
        return stacked

    def projection(number: int, kind: str) -> torch.Tensor:
        name = f"mlp.experts.{number}.{kind}_proj.weight"
        if name not in tensors:
            raise UserError(
                f"weight {name!r} of the MTP module is missing in {where!r}; restore the folder"
            )
        return tensors[name]

    experts = range(max(numbers) + 1)
    halves = [
        torch.cat([projection(number, "gate"), projection(number, "up")]) for number in experts
    ]
    return {
        **stacked,
        GATE_UP: torch.stack(halves),
        DOWN: torch.stack([projection(number, "down") for number in experts]),
    }


def single_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse."""
    single = {name: tensor for name, tensor in tensors.items() if name not in (GATE_UP, DOWN)}
    if GATE_UP not in tensors:
        return single
    for number, (gate_up, down) in enumerate(zip(tensors[GATE_UP], tensors[DOWN], strict=True)):
        gate, up = gate_up.chunk(2)
        for kind, tensor in (("gate", gate), ("up", up), ("down", down)):
            single[f"mlp.experts.{number}.{kind}_proj.weight"] = tensor
    return single


class AppendedMtp(MtpHead):
    def __init__(self, target: Target):
        config = copy.deepcopy(target.config)
        config._attn_implementation = register()
        last = target.layers[-1]
        layer: Callable[..., torch.nn.Module] = type(last)
        norm: Callable[..., torch.nn.Module] = type(last.input_layernorm)
        super().__init__(
            config,
            target,
            tap=FINAL,
            norm=partial(norm, config.hidden_size, eps=config.rms_norm_eps),
            # One more of the last layer's kind: the first ones have no experts.
            layer=partial(layer, config, layer_idx=target.num_layers - 1),
            rotary=target.model.base_model.rotary_emb,
            feeds_normed=FEEDS_NORMED[config.model_type],
        )
        self.layer.self_attn.layer_idx = 0  # of a pool of its own

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """The router's biases stay float32 wherever the module goes, as in the target: rounded,
        they choose other experts."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers():
            if buffer.dtype != before[name].dtype:
                buffer.data = before[name].to(buffer.device)
        return self

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool:
        shape = self.cache_shape()
        return PagedPool.empty(
            num_layers=1,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=shape.num_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            device=device,
            dtype=dtype,
        )

    @torch.no_grad()
    def cache_shape(self) -> LayerShape:
        """Shape of the keys and values that the layer hands to its attention, found by running it:
        every kind of attention has other config keys for it."""
        weight = self.eh_proj.weight
        state = torch.zeros(1, 1, weight.shape[0], device=weight.device, dtype=weight.dtype)
        attention = AttentionShapes()
        self.step(
            state, state, torch.zeros(1, 1, dtype=torch.int64, device=weight.device), attention
        )
        return attention.shapes[0]

    def save(self, folder: Path) -> None:
        values: dict[str, Any] = json.loads(self.config.to_json_string(use_diff=False))
        values |= {
            "num_nextn_predict_layers": 1,
            "dtype": str(self.eh_proj.weight.dtype).removeprefix("torch."),
        }
        write_weights(Path(folder), values, published_names(self.state_dict(), prefix_of(values)))

    @classmethod
    def load(cls, folder: Path, target: Target) -> AppendedMtp:
        values = read_config(folder)
        for key, own in (
            ("model_type", target.config.model_type),
            ("num_hidden_layers", target.num_layers),
        ):
            if values.get(key) != own:
                raise UserError(
                    f"the MTP module in {str(folder)!r} is for a target with "
                    f"{key}={values.get(key)!r} and {target.name!r} has "
                    f"{own!r}; use another draft"
                )
        tensors = own_names(
            module_tensors(folder, values, prefix_of(values), needed="eh_proj.weight"), str(folder)
        )
        with torch.device("meta"):  # its experts may be many: the weights are made once
            drafter = cls(target)
        drafter.to(tensors["eh_proj.weight"].dtype).to_empty(device="cpu")
        load_into(drafter, tensors, str(folder))
        return drafter
