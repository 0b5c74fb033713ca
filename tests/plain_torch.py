"""Forward passes of published drafts in plain torch, from tensors and formulas alone: what
draftsmith's modules are compared with. T tokens, H width, D width of a head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


def rms(states: torch.Tensor, weight: torch.Tensor | float, eps: float = 1e-6) -> torch.Tensor:
    return weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)


def linear(states: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    result = states @ tensors[f"{name}.weight"].T
    return result + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else result


def rotated(
    states: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0, *, pairs: bool = False
) -> torch.Tensor:
    """[T, heads, D]; `pairs`: neighbours are rotated together, and come out as halves."""
    width = states.shape[-1]
    angles = positions[:, None].double() * theta ** (
        -torch.arange(0, width, 2, dtype=torch.float64) / width
    )
    cos, sin = (part[:, None].to(states.dtype) for part in (angles.cos(), angles.sin()))
    first, second = (states[..., 0::2], states[..., 1::2]) if pairs else states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def causal(length: int, window: int | None = None) -> torch.Tensor:
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    return sees if window is None else sees.triu(1 - window)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: torch.Tensor
) -> torch.Tensor:
    """[T, heads, D], [S, kv_heads, D] and [T, S] bool -> [T, heads * D]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def heads(states: torch.Tensor, tensors: Tensors, name: str, width: int) -> torch.Tensor:
    return linear(states, tensors, name).unflatten(-1, (-1, width))


def plain_attention(
    states: torch.Tensor,
    positions: torch.Tensor,
    tensors: Tensors,
    prefix: str,
    width: int,
    *,
    window: int | None = None,
) -> torch.Tensor:
    """Llama's, or Qwen3's where there are norms of queries and keys."""
    parts = {}
    for name in "qkv":
        parts[name] = heads(states, tensors, f"{prefix}{name}_proj", width)
        if f"{prefix}{name}_norm.weight" in tensors:
            parts[name] = rms(parts[name], tensors[f"{prefix}{name}_norm.weight"])
    query, key = (rotated(parts[name], positions) for name in "qk")
    sees = causal(len(states), window)
    return linear(attend(query, key, parts["v"], sees), tensors, f"{prefix}o_proj")


def latent_attention(
    states: torch.Tensor,
    positions: torch.Tensor,
    tensors: Tensors,
    prefix: str,
    config: Mapping[str, Any],
) -> torch.Tensor:
    """DeepSeek's: queries and keys of two parts, of which one is rotated and the keys' shared."""
    rope, nope, rank = (
        config[key] for key in ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank")
    )
    low = rms(
        linear(states, tensors, f"{prefix}q_a_proj"), tensors[f"{prefix}q_a_layernorm.weight"]
    )
    query = heads(low, tensors, f"{prefix}q_b_proj", rope + nope)
    latent, shared = linear(states, tensors, f"{prefix}kv_a_proj_with_mqa").split([rank, rope], -1)
    latent = rms(latent, tensors[f"{prefix}kv_a_layernorm.weight"])
    both = heads(latent, tensors, f"{prefix}kv_b_proj", nope + config["v_head_dim"])
    shared = rotated(shared[:, None], positions, pairs=True).expand(-1, both.shape[1], -1)
    key = torch.cat([both[..., :nope], shared], dim=-1)
    query = torch.cat(
        [query[..., :nope], rotated(query[..., nope:], positions, pairs=True)], dim=-1
    )
    return linear(
        attend(query, key, both[..., nope:], causal(len(states))), tensors, f"{prefix}o_proj"
    )


def mlp(states: torch.Tensor, tensors: Tensors, prefix: str) -> torch.Tensor:
    gate = torch.nn.functional.silu(linear(states, tensors, f"{prefix}gate_proj"))
    return linear(gate * linear(states, tensors, f"{prefix}up_proj"), tensors, f"{prefix}down_proj")


def layer(
    states: torch.Tensor, positions: torch.Tensor, tensors: Tensors, prefix: str, width: int
) -> torch.Tensor:
    """A decoder layer; without an `input_layernorm` its attention reads the states as they are."""
    name = f"{prefix}input_layernorm.weight"
    normed = rms(states, tensors[name]) if name in tensors else states
    states = states + plain_attention(normed, positions, tensors, f"{prefix}self_attn.", width)
    normed = rms(states, tensors[f"{prefix}post_attention_layernorm.weight"])
    return states + mlp(normed, tensors, f"{prefix}mlp.")


# (embeddings [T, H], states [T, H], positions [T]) -> what the head reads, what is fed back.
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def chain(
    step: Step,
    embed: Callable[[torch.Tensor], torch.Tensor],
    true_states: torch.Tensor,
    text: list[int],
    drafted: list[int],
) -> torch.Tensor:
    """What the head reads of each drafted token [k, H], of a head that reads its own states:
    `true_states` [n - 1, H] of a text of n tokens."""
    states, read = true_states, []
    for depth in range(len(drafted)):
        tokens = torch.tensor(text[1:] + drafted[:depth])
        out, fed = step(embed(tokens), states, torch.arange(len(tokens)))
        read.append(out[-1])
        states = torch.cat([states, fed[-1:]])
    return torch.stack(read)
