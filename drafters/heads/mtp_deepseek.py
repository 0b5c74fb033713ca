"""An MTP module that its target brought along as one more decoder layer: DeepSeek-V3, GLM-4.5 to 4.7.

Its block is a layer of the target's own class, with experts and latent attention where those have them. The state it reads is the
one that the target's head multiplies, after the final norm. It is saved under the names it was published with.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftsmith.drafters.heads.appended_names import FEEDS_NORMED, own_names, prefix_of, published_names
from draftsmith.drafters.heads.mtp_head import MtpHead
from draftsmith.drafters.heads.mtp_mimo import module_tensors
from draftsmith.drafters.target.attention import register
from draftsmith.drafters.target.probe import LayerShape, Recorder
from draftsmith.drafters.target.target import FINAL, Target
from draftsmith.drafters.weights import load_into, read_config, write_weights
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPool

if TYPE_CHECKING:
    from typing_extensions import Self


class AppendedMtp(MtpHead):
    def __init__(self, target: Target):
        config = copy.deepcopy(target.config)
        config._attn_implementation = register()
        last = target.layers[-1]
        super().__init__(
            config,
            target,
            tap=FINAL,
            norm=partial(type(last.input_layernorm), config.hidden_size, eps=config.rms_norm_eps),
            # One more of the last layer's kind: the first ones have no experts.
            layer=partial(type(last), config, layer_idx=target.num_layers - 1),
            rotary=target.model.base_model.rotary_emb,
            feeds_normed=FEEDS_NORMED[config.model_type],
        )
        self.layer.self_attn.layer_idx = 0  # of a pool of its own

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """The router's biases stay float32 wherever the module goes, as in the target: rounded, they choose other experts."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers():
            if buffer.dtype != before[name].dtype:
                buffer.data = before[name].to(buffer.device)
        return self

    def new_pool(self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype) -> PagedPool:
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
        """What the layer asks of its attention: its config says so in other words for every kind of attention."""
        weight = self.eh_proj.weight
        state = torch.zeros(1, 1, weight.shape[0], device=weight.device, dtype=weight.dtype)
        recorder = Recorder()
        self.step(state, state, torch.zeros(1, 1, dtype=torch.int64, device=weight.device), recorder)
        return recorder.shapes[0]

    def save(self, folder: Path) -> None:
        values: dict[str, Any] = json.loads(self.config.to_json_string(use_diff=False))
        values |= {"num_nextn_predict_layers": 1, "dtype": str(self.eh_proj.weight.dtype).removeprefix("torch.")}
        write_weights(Path(folder), values, published_names(self.state_dict(), prefix_of(values)))

    @classmethod
    def load(cls, folder: Path, target: Target) -> AppendedMtp:
        values = read_config(folder)
        for key, own in (("model_type", target.config.model_type), ("num_hidden_layers", target.num_layers)):
            if values.get(key) != own:
                raise UserError(
                    f"the MTP module in {str(folder)!r} is for a target with {key}={values.get(key)!r} and {target.name!r} has "
                    f"{own!r}; use another draft"
                )
        tensors = own_names(module_tensors(folder, values, prefix_of(values), needed="eh_proj.weight"), str(folder))
        with torch.device("meta"):  # its experts may be many: the weights are made once
            drafter = cls(target)
        drafter.to(tensors["eh_proj.weight"].dtype).to_empty(device="cpu")
        load_into(drafter, tensors, str(folder))
        return drafter
