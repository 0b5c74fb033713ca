"""One MTP module (DeepSeek-V3, arXiv 2412.19437, section 2.2), applied again and again to its own output.

    input at t  = eh_proj(cat(enorm(embed(x_{t+1})), hnorm(state)))        state: the target's last one, or the module's own
    next state  = norm(decoder layer(input));   logits of x_{t+2} = target's head(next state)

The target's last state is taken before its final norm, the recursion feeds back the module's own after its norm, and the
embedding at position 0 is zero: vLLM's MiMo model does all three, so a module stitched into the target is the same model there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from draftsmith.drafters.attention import AttentionContext
from draftsmith.drafters.head_init import fitted_norm, output_table
from draftsmith.drafters.head_shape import config_dict, llama_config, shape_of
from draftsmith.drafters.heads import FeatureHead, HeadStep
from draftsmith.drafters.native_mtp import is_native, read_native
from draftsmith.drafters.options import MtpOptions
from draftsmith.drafters.target import Target
from draftsmith.drafters.weights import load_into, read_config, read_weights, write_weights
from draftsmith.errors import UserError

ARCHITECTURE = "DraftsmithMtp"


class Mtp(FeatureHead):
    """Embeddings and head are the target's, frozen and not part of the module. A target's own module is one, too."""

    family = "mtp"

    def __init__(self, config: LlamaConfig, target: Target):
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.taps = (target.num_layers,)  # raw id L
        # In tuples, lest nn.Module register the target's weights as ours, or cast the rotary frequencies.
        self._target = (target,)
        self._rotary = (LlamaRotaryEmbedding(config),)
        self.enorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.hnorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = LlamaDecoderLayer(config, layer_idx=0)
        if config.attention_bias:  # of a module that its target brought along: Qwen2's block has none here
            self.layer.self_attn.o_proj.bias = None
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.to(target.device)

    @classmethod
    def create(cls, options: MtpOptions, target: Target, *, seed: int, token_counts: torch.Tensor | None = None) -> Mtp:
        """`token_counts` is not needed: the head is the target's own."""
        shape = shape_of(target)
        if options.intermediate_size is not None:
            shape["intermediate_size"] = options.intermediate_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drafter = cls(llama_config(shape), target)
        # The head is frozen, so the module must speak its language: outputs of the size of the target's own final states.
        # The layer stays random: begun as the target's last one it learned more slowly (tau 1.40 against 1.62 after 60 steps).
        drafter.norm.weight.data.copy_(fitted_norm(target))
        return drafter

    @property
    def vocab_map(self) -> torch.Tensor | None:
        return None

    def head_weight(self) -> torch.Tensor:
        return output_table(self._target[0]).to(self.eh_proj.weight.dtype)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        return taps.to(self.eh_proj.weight.dtype)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._target[0].embed(ids).to(self.eh_proj.weight.dtype)

    def step(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> HeadStep:
        embeds = embeds.masked_fill((positions == 0)[..., None], 0.0)
        mixed = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))
        rotary = self._rotary[0](mixed, positions)
        state = self.norm(self.layer(mixed, position_embeddings=rotary, attention_context=context))
        return HeadStep(next_hidden=state, head_input=state)

    def save(self, folder: Path) -> None:
        values = {"architectures": [ARCHITECTURE], "model_type": "llama", **config_dict(self.config)}
        values |= {"dtype": str(self.eh_proj.weight.dtype).removeprefix("torch."), "tie_word_embeddings": False}
        write_weights(Path(folder), values, self.state_dict())

    @classmethod
    def load(cls, folder: Path, target: Target) -> Mtp:
        folder = Path(folder)
        values = read_config(folder)
        check_shape(values, target, folder)
        native = is_native(values)
        tensors = read_native(folder, values) if native else read_weights(folder)
        if native:
            values = {**values, "attention_bias": "layer.self_attn.q_proj.bias" in tensors}
        drafter = cls(llama_config(values), target)
        drafter.to(tensors["eh_proj.weight"].dtype if "eh_proj.weight" in tensors else torch.float32)
        load_into(drafter, tensors, str(folder))
        return drafter


def check_shape(values: dict[str, Any], target: Target, folder: Path) -> None:
    for key, wanted in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        if values.get(key) != wanted:
            raise UserError(
                f"draft {str(folder)!r} has {key}={values.get(key)!r} where {wanted!r} is needed for {target.name!r}; "
                "use another draft"
            )
