"""Patches of model classes that are older than transformers' attention interface, or count tokens
where they should look at positions. Each changes a method of the loaded modules in place: their
products of queries and keys become the pass's attention, everything else stays theirs.

Alibi is a bias of the scores by the position of the key, a slope per head. Queries and keys get two
more columns whose product is that bias, so that the pool holds positions beside keys and every
attention is as it was: slope * position = (256 * slope) * (position // 256) + slope * (position %
256), whose factors are exact in half precision too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from draftsmith.kernels.attention.pool import Scoring

LOW = 256


def bloom(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *rest: Any, **named: Any
) -> Any:
    """`forward` of BLOOM's attention."""
    if (now := current()) is None:
        return type(self).forward(self, hidden_states, residual, *rest, **named)
    bias_of = vars(sys.modules[type(self).__module__])["build_alibi_tensor"]
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    # Of two neighbouring keys, the later has a bias larger by the slope.
    two = torch.ones(1, 2, dtype=torch.long, device=hidden_states.device)
    bias = bias_of(two, self.num_heads, torch.float32)[:, 0]
    slopes = bias[:, 1] - bias[:, 0]
    out = _attend(now, self, query, key, value, slopes, self.inv_norm_factor)
    return self.dense(out) + residual, None


def bloom_bias(self: Any, *inputs: Any, **named: Any) -> torch.Tensor | None:
    """`build_alibi_tensor` of BLOOM's body, which would make the bias of another layout out of the
    mask."""
    return type(self).build_alibi_tensor(self, *inputs, **named) if current() is None else None


def mpt(self: Any, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """`forward` of MPT's attention."""
    if (now := current()) is None:
        return type(self).forward(self, hidden_states, *rest, **named)
    bias_of = vars(sys.modules[type(self).__module__])["build_mpt_alibi_tensor"]
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        part.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2)
        for part in mixed.chunk(3, dim=2)
    )
    # Of two neighbouring keys, the later has a bias larger by the slope.
    bias = bias_of(self.n_heads, 2, device=hidden_states.device)[:, 0]
    slopes = bias[:, 1] - bias[:, 0]
    out = _attend(now, self, query, key, value, slopes, self.softmax_scale)
    return self.out_proj(out), None


def _attend(
    now: CurrentPass,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Three of [1, heads, T, dim], slopes [heads] -> [1, T, heads * dim]."""
    places = now.positions.to(query.device)[0]
    columns = torch.stack([places // LOW, places % LOW], dim=-1).to(key.dtype)
    weights = torch.stack([slopes * LOW, slopes], dim=-1) / scaling
    query = torch.cat(
        [query, weights.to(query.dtype)[None, :, None].expand(*query.shape[:3], 2)], -1
    )
    key = torch.cat([key, columns.expand(*key.shape[:2], -1, -1)], dim=-1)
    return now.attend(module, query, key, value, Scoring(scaling)).flatten(2)


def scores(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`_attn` of classes that attend in such a method (GPT-J, CodeGen, GPT-NeoX Japanese,
    GPT-Neo)."""
    if (now := current()) is None:
        return type(self)._attn(self, query, key, value, *rest)
    # GPT-Neo divides by nothing.
    divisor = getattr(self, "scale_attn", None) or getattr(self, "norm_factor", None) or 1.0
    is_local = getattr(self, "attention_type", "global") == "local"
    rule = Scoring(1.0 / float(divisor), self.config.window_size if is_local else None)
    query, key = query.to(value.dtype), key.to(value.dtype)
    return now.attend(self, query, key, value, rule).transpose(1, 2), None


def bert(self: Any, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """`forward` of classes made after BERT's old one (RemBERT, Megatron-BERT)."""
    if (now := current()) is None:
        return type(self).forward(self, hidden_states, *rest, **named)
    size = self.attention_head_size
    query, key, value = (
        part(hidden_states).unflatten(-1, (-1, size)).transpose(1, 2)
        for part in (self.query, self.key, self.value)
    )
    return now.attend(self, query, key, value, Scoring(size**-0.5)).flatten(2), None


def falcon(
    self: Any, hidden_states: torch.Tensor, alibi: torch.Tensor | None, *rest: Any, **named: Any
) -> Any:
    """`forward` of Falcon with rotary embeddings. With alibi it stays as it is, and the probe
    refuses it."""
    now = current()
    if now is None or alibi is not None:
        return type(self).forward(self, hidden_states, alibi, *rest, **named)
    rotate = vars(sys.modules[type(self).__module__])["apply_rotary_pos_emb"]
    heads = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (states.transpose(1, 2) for states in heads)
    query, key = rotate(query, key, *named["position_embeddings"])
    out = now.attend(self, query, key, value, Scoring(self.inv_norm_factor))
    return self.dense(out.flatten(2)), None


def numbered(self: Any, *inputs: Any, layer_idx: int, **named: Any) -> Any:
    """`forward` of Zamba2's, which has the number of its layer in calls alone; keys and values go
    by the module's."""
    self.layer_idx = layer_idx
    return type(self).forward(self, *inputs, layer_idx=layer_idx, **named)


def counted(self: Any, *inputs: Any, **named: Any) -> torch.Tensor:
    """`forward` of such an embedding."""
    if (now := current()) is None:
        return type(self).forward(self, *inputs, **named)
    places = now.positions + getattr(self, "offset", 0)
    return torch.nn.functional.embedding(places, self.weight)


def tempered(self: Any, *inputs: Any, **named: Any) -> Any:
    """`forward` of Llama 4's attention, whose layers without rotation scale queries by position."""
    if (now := current()) is None or self.use_rope or not self.attn_temperature_tuning:
        return type(self).forward(self, *inputs, **named)
    unscaled = copy.copy(self)  # of the same weights
    unscaled.attn_temperature_tuning = False
    steps = torch.floor((now.positions.float() + 1.0) / self.floor_scale)
    scale = torch.log1p(steps) * self.attn_scale + 1.0
    # Reaches our attention function through the module's options.
    return type(self).forward(unscaled, *inputs, query_scale=scale[:, None, :, None], **named)


# The method that is patched, and what stands in its place.
PATCHES: dict[str, tuple[str, Callable[..., Any]]] = {
    "GPTJAttention": ("_attn", scores),
    "CodeGenAttention": ("_attn", scores),
    "GPTNeoXJapaneseAttention": ("_attn", scores),
    "GPTNeoSelfAttention": ("_attn", scores),
    "RemBertSelfAttention": ("forward", bert),
    "MegatronBertSelfAttention": ("forward", bert),
    "FalconAttention": ("forward", falcon),
    "BloomAttention": ("forward", bloom),
    "BloomModel": ("build_alibi_tensor", bloom_bias),
    "MptAttention": ("forward", mpt),
    "Zamba2Attention": ("forward", numbered),
    "Llama4TextAttention": ("forward", tempered),
    "BartLearnedPositionalEmbedding": ("forward", counted),
    "MBartLearnedPositionalEmbedding": ("forward", counted),
    "PLBartLearnedPositionalEmbedding": ("forward", counted),
    "BigBirdPegasusLearnedPositionalEmbedding": ("forward", counted),
    "BlenderbotLearnedPositionalEmbedding": ("forward", counted),
    "BlenderbotSmallLearnedPositionalEmbedding": ("forward", counted),
    "PegasusSinusoidalPositionalEmbedding": ("forward", counted),
    "MarianSinusoidalPositionalEmbedding": ("forward", counted),
}
# Kinds whose own attention needs masks that add up: it is the one that they have no name for, or
# misread without a word.
OWN_ATTENTION = frozenset(
    {
        "falcon",
        "gptj",
        "gpt_neo",
        "codegen",
        "gpt_neox_japanese",
        "bloom",
        "mpt",
        "rembert",
        "megatron-bert",
    }
)


def implementation(config: PreTrainedConfig, ours: str) -> str:
    """The name of the attention that a model is made with: `ours`, or its own."""
    return "eager" if config.model_type in OWN_ATTENTION else ours


def patch(model: torch.nn.Module) -> None:
    """Patches every module of a class in the table."""
    for module in model.modules():
        if (found := PATCHES.get(type(module).__name__)) is not None:
            name, method = found
            # Bound, so that a copy of the module runs on its own weights.
            setattr(module, name, MethodType(method, module))


class CurrentPass(NamedTuple):
    context: Any  # an `AttentionContext` of drafters/target/attention.py
    positions: torch.Tensor  # [1, T]

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: Scoring,
    ) -> torch.Tensor:
        """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T, heads,
        value_dim]."""
        layer = module.layer_idx if hasattr(module, "layer_idx") else module.layer_id
        return self.context.attend(layer, query, key, value, rule).contiguous()


_current: ContextVar[CurrentPass | None] = ContextVar("current pass", default=None)


@contextmanager
def running(context: Any, positions: torch.Tensor) -> Iterator[None]:
    """Around a forward pass with a context."""
    token = _current.set(CurrentPass(context, positions))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> CurrentPass | None:
    """None in a pass without a context, in which a patched module runs its own code."""
    return _current.get()
