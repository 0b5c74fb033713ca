"""Miniature drafts in every layout that others publish, and what each of them drafts in plain
torch. Names of tensors and keys of configurations are those of the published folders."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftsmith.drafters.options import default_taps
from draftsmith.drafters.target.target import Target
from tests import plain_torch as plain

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
# (folder's config, tensors, target, text, drafted tokens) -> [k, Vd] logits of each drafted token.
Reference = Callable[[Config, Tensors, Target, list[int], list[int]], torch.Tensor]
DTYPE = torch.float64


@dataclass(frozen=True)
class Made:
    config: Config
    tensors: Tensors
    pickled: str = ""  # name of a pickled file in place of model.safetensors
    stored: str = "model.safetensors"
    files: Callable[[Path], None] | None = None  # what else the folder holds

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.pickled:
            torch.save(self.tensors, folder / self.pickled)
        else:
            save_file(self.tensors, folder / self.stored, metadata={"format": "pt"})
        if self.files is not None:
            self.files(folder)


@dataclass(frozen=True)
class Layout:
    """`make` returns the folder's contents for the tiny Llama, in `DTYPE`."""

    name: str
    family: str
    make: Callable[[Target], Made]
    reference: Reference


class Noise:
    """Tensors of reproducible noise, of the scale of a trained layer's."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> torch.Tensor:
        return self.randn(*shape) * 1.2 * shape[-1] ** -0.5

    def gains(self, size: int) -> torch.Tensor:
        return 1 + 0.3 * self.randn(size)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=DTYPE)


SHAPE: Config = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "vocab_size": 288, "rope_theta": 10000.0,
}  # fmt: skip
SIZE, INNER, VOCAB, WIDTH = 32, 48, 288, 8


def attention_tensors(
    noise: Noise, prefix: str, *, inputs: int = SIZE, bias: str = "", norms: bool = False
) -> Tensors:
    """`bias` names the projections that have one."""
    rows = {"q": 32, "k": 16, "v": 16, "o": SIZE}
    tensors = {
        f"{prefix}{name}_proj.weight": noise.matrix(size, 32 if name == "o" else inputs)
        for name, size in rows.items()
    }
    tensors |= {f"{prefix}{name}_proj.bias": 0.2 * noise.randn(rows[name]) for name in bias}
    if norms:
        tensors |= {f"{prefix}{name}_norm.weight": noise.gains(WIDTH) for name in "qk"}
    return tensors


def mlp_tensors(noise: Noise, prefix: str) -> Tensors:
    shapes = {"gate": (INNER, SIZE), "up": (INNER, SIZE), "down": (SIZE, INNER)}
    return {f"{prefix}{name}_proj.weight": noise.matrix(*shape) for name, shape in shapes.items()}


def layer_tensors(noise: Noise, prefix: str, *, first_norm: bool = True, **kind: Any) -> Tensors:
    tensors = attention_tensors(noise, f"{prefix}self_attn.", **kind)
    tensors |= mlp_tensors(noise, f"{prefix}mlp.")
    tensors[f"{prefix}post_attention_layernorm.weight"] = noise.gains(SIZE)
    if first_norm:
        tensors[f"{prefix}input_layernorm.weight"] = noise.gains(SIZE)
    return tensors


def final_states(target: Target, text: list[int]) -> torch.Tensor:
    """[n - 1, H], what the head multiplies."""
    ids = torch.tensor([text[:-1]])
    return target.states(ids, torch.ones_like(ids), ())[1][0]


def tapped_states(target: Target, text: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([text[:-1]])
    return target.states(ids, torch.ones_like(ids), taps)[0][0]


def table(target: Target) -> torch.Tensor:
    return target.model.get_output_embeddings().weight


# EAGLE-1


def eagle1_tensors(target: Target, *, bias: bool, qkv: str = "") -> Tensors:
    noise = Noise(1)
    tensors = {"fc.weight": noise.matrix(SIZE, 2 * SIZE)}
    if bias:
        tensors["fc.bias"] = 0.2 * noise.randn(SIZE)
    tensors |= layer_tensors(noise, "layers.0.", first_norm=False, bias=qkv)
    tensors["embed_tokens.weight"] = target.embed(torch.arange(VOCAB)).clone()
    return tensors


def eagle1_reference(
    config: Config, tensors: Tensors, target: Target, text: list[int], drafted: list[int]
) -> torch.Tensor:
    def step(
        embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = plain.linear(torch.cat([embeds, states], dim=-1), tensors, "fc")
        out = plain.layer(mixed, positions, tensors, "layers.0.", WIDTH)
        return out, out

    states = final_states(target, text)
    return plain.chain(step, target.embed, states, text, drafted) @ table(target).T


def safeailab(target: Target) -> Made:
    """yuhuili/EAGLE-*: the architecture of the target, pickled."""
    config = SHAPE | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    return Made(config, eagle1_tensors(target, bias=True), pickled="pytorch_model.bin")


def safeailab_qwen2(target: Target) -> Made:
    """yuhuili/EAGLE-Qwen2-*: biases of queries, keys and values."""
    config = SHAPE | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 1,
        "qkv_bias": True,
    }  # fmt: skip
    return Made(config, eagle1_tensors(target, bias=True, qkv="qkv"), pickled="pytorch_model.bin")


def lmsys_eagle(target: Target) -> Made:
    config = SHAPE | {
        "architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "num_hidden_layers": 1,
    }  # fmt: skip
    return Made(config, eagle1_tensors(target, bias=True))


SPECULATORS_NAMES = {"fc.": "fusion_fc.", "layers.0.": "transformer."}


def redhat_eagle(target: Target, *, bias: bool = True) -> Made:
    """HASS, or EAGLE-1 without a bias."""
    layer = SHAPE | {"model_type": "llama", "num_hidden_layers": 1}
    config = speculators_config("eagle", ["EagleSpeculator", "LlamaDecoderLayer"], layer) | {
        "transformer_layer_architecture": "LlamaDecoderLayer", "fusion_bias": bias,
        "layernorms": False,
    }  # fmt: skip
    tensors = eagle1_tensors(target, bias=bias)
    for ours, theirs in SPECULATORS_NAMES.items():
        tensors = {
            theirs + name.removeprefix(ours) if name.startswith(ours) else name: tensor
            for name, tensor in tensors.items()
        }
    return Made(config, tensors | {"lm_head.weight": table(target).detach().clone()})


def redhat_eagle_norms(target: Target) -> Made:
    """The variant with `layernorms`: of the embedding, before the attention and before the head."""
    made, noise = redhat_eagle(target, bias=False), Noise(2)
    names = ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm")
    norms = {f"{name}.weight": noise.gains(SIZE) for name in names}
    return Made(made.config | {"layernorms": True}, made.tensors | norms)


def redhat_reference(
    config: Config, tensors: Tensors, target: Target, text: list[int], drafted: list[int]
) -> torch.Tensor:
    for ours, theirs in SPECULATORS_NAMES.items():
        tensors = {
            ours + name.removeprefix(theirs) if name.startswith(theirs) else name: tensor
            for name, tensor in tensors.items()
        }
    return eagle1_reference(config, tensors, target, text, drafted)


def normed_reference(
    config: Config, tensors: Tensors, target: Target, text: list[int], drafted: list[int]
) -> torch.Tensor:
    def step(
        embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embeds = plain.rms(embeds, tensors["embedding_layernorm.weight"])
        mixed = plain.linear(torch.cat([embeds, states], dim=-1), tensors, "fusion_fc")
        out = plain.layer(mixed, positions, tensors, "transformer.", WIDTH)
        return plain.rms(out, tensors["pre_lm_head_layernorm.weight"]), out

    states = final_states(target, text)
    return plain.chain(step, target.embed, states, text, drafted) @ table(target).T


def speculators_config(kind: str, architectures: list[str], layer: Config) -> Config:
    return {
        "architectures": architectures, "speculators_model_type": kind,
        "speculators_version": "0.9.0", "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip


# DFlash


def block_tensors(noise: Noise, *, layers: int, taps: int, bias: str = "") -> Tensors:
    tensors = {
        "fc.weight": noise.matrix(SIZE, taps * SIZE),
        "hidden_norm.weight": noise.gains(SIZE),
        "norm.weight": noise.gains(SIZE),
    }
    for layer in range(layers):
        tensors |= layer_tensors(noise, f"layers.{layer}.", bias=bias, norms=True)
    return tensors


MASK_TOKEN = 7
TAPPED = (1, 3)  # raw ids; outputs 0 and 2


def dflash_config(**changed: Any) -> Config:
    block = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [tap - 1 for tap in TAPPED]}
    return SHAPE | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
        "attention_bias": False, "block_size": 5, "num_target_layers": 4,
        "layer_types": ["full_attention"] * 2, "sliding_window": None,
        "use_sliding_window": False, "max_window_layers": 2, "tie_word_embeddings": False,
        "dflash_config": block | changed.pop("block", {}),
    } | changed  # fmt: skip


def block_states(
    tensors: Tensors, target: Target, text: list[int], slots: int,
    *, sees: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    mask_embedding: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """[S, H] of the block behind `text`, as the head reads them. `sees` (layer, positions of slots
    [S, 1], of keys [K]) -> [S, K] bool; None: all of them."""
    context = plain.linear(tapped_states(target, text, TAPPED), tensors, "fc")
    context = plain.rms(context, tensors["hidden_norm.weight"])
    newest = len(text) - 1
    positions = newest + torch.arange(slots)
    every = torch.cat([torch.arange(newest), positions])
    states = target.embed(torch.tensor([text[-1]] + [MASK_TOKEN] * (slots - 1)))
    if mask_embedding is not None:
        states = torch.cat([states[:1], mask_embedding.expand(slots - 1, -1)])
    for layer in range(2):
        prefix = f"layers.{layer}.self_attn."
        inner = plain.rms(states, tensors[f"layers.{layer}.input_layernorm.weight"])
        both = torch.cat([context, inner])
        query = plain.heads(inner, tensors, f"{prefix}q_proj", WIDTH)
        key = plain.heads(both, tensors, f"{prefix}k_proj", WIDTH)
        query = plain.rotated(plain.rms(query, tensors[f"{prefix}q_norm.weight"]), positions)
        key = plain.rotated(plain.rms(key, tensors[f"{prefix}k_norm.weight"]), every)
        value = plain.heads(both, tensors, f"{prefix}v_proj", WIDTH)
        visible = torch.ones(slots, len(every), dtype=torch.bool)
        if sees is not None:
            visible = sees(layer, positions[:, None], every)
        attended = plain.attend(query, key, value, visible)
        states = states + plain.linear(attended, tensors, f"{prefix}o_proj")
        normed = plain.rms(states, tensors[f"layers.{layer}.post_attention_layernorm.weight"])
        states = states + plain.mlp(normed, tensors, f"layers.{layer}.mlp.")
    return plain.rms(states, tensors["norm.weight"])


def dflash_reference(
    config: Config,
    tensors: Tensors,
    target: Target,
    text: list[int],
    drafted: list[int],
    **seen: Any,
) -> torch.Tensor:
    states = block_states(tensors, target, text, 1 + len(drafted), **seen)[1:]
    return states @ tensors.get("lm_head.weight", table(target)).T


def zlab(target: Target) -> Made:
    return Made(dflash_config(), block_tensors(Noise(2), layers=2, taps=2))


def zlab_gpt_oss(target: Target) -> Made:
    tensors = block_tensors(Noise(3), layers=2, taps=2, bias="qkvo")
    return Made(dflash_config(attention_bias=True), tensors)


WINDOW = 6


def zlab_sliding(target: Target) -> Made:
    """One layer with a window, which is causal, and one without, which is not."""
    config = dflash_config(
        layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW,
        use_sliding_window=True,
    )  # fmt: skip
    return Made(config, block_tensors(Noise(4), layers=2, taps=2))


def sliding_reference(*given: Any) -> torch.Tensor:
    def sees(layer: int, slots: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        everything = torch.ones(len(slots), len(keys), dtype=torch.bool)
        return everything if layer == 1 else (keys <= slots) & (slots - keys < WINDOW)

    return dflash_reference(*given, sees=sees)


def xiaomi_swa(target: Target) -> Made:
    """Windows by `use_swa`, no layer causal, and an embedding of the mask token of its own."""
    config = dflash_config(block={"use_swa": True, "swa_window_size": WINDOW})
    embedding = Noise(9).randn(1, SIZE)

    def save_embedding(folder: Path) -> None:
        found = {"embedding": embedding, "mask_token_id": MASK_TOKEN}
        torch.save(found, folder / "mask_embedding.pt")

    return Made(config, block_tensors(Noise(5), layers=2, taps=2), files=save_embedding)


def swa_reference(*given: Any) -> torch.Tensor:
    def sees(layer: int, slots: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return slots - keys < WINDOW

    return dflash_reference(*given, sees=sees, mask_embedding=Noise(9).randn(1, SIZE))


def redhat_dflash(target: Target) -> Made:
    """Raw layer ids, a head over part of the vocabulary, embeddings of the target."""
    layer = SHAPE | {"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": False}
    config = speculators_config("dflash", ["DFlashSpeculator"], layer) | {
        "aux_hidden_state_layer_ids": list(TAPPED), "block_size": 5, "draft_vocab_size": 100,
        "mask_token_id": MASK_TOKEN, "sample_from_anchor": False,
        "sliding_window_non_causal": False, "target_hidden_size": None,
    }  # fmt: skip
    noise = Noise(6)
    tensors = block_tensors(noise, layers=2, taps=2)
    ids = reduced_ids()
    tensors |= {
        "lm_head.weight": noise.matrix(100, SIZE),
        "d2t": ids - torch.arange(100),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
        "embed_tokens.weight": target.embed(torch.arange(VOCAB)).clone(),
        "verifier_norm.weight": torch.ones(SIZE, dtype=DTYPE),
    }
    return Made(config, tensors)


def reduced_ids() -> torch.Tensor:
    """[100] target ids, ascending."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:100].sort().values


# EAGLE-3


def eagle3_tensors(
    target: Target, prefix: str = "midlayer.", *, norms: bool = False, vocab: int = 100
) -> Tensors:
    noise, size = Noise(11), 2 * SIZE
    tensors = layer_tensors(noise, prefix, inputs=size, norms=norms)
    return tensors | eagle3_rest(noise, prefix, vocab)


def eagle3_rest(noise: Noise, prefix: str, vocab: int) -> Tensors:
    tensors = {
        "fc.weight": noise.matrix(SIZE, 2 * SIZE),
        f"{prefix}hidden_norm.weight": noise.gains(SIZE),
        "norm.weight": noise.gains(SIZE),
        "lm_head.weight": noise.matrix(vocab, SIZE),
    }
    if vocab == VOCAB:
        return tensors
    ids = reduced_ids()
    return tensors | {
        "d2t": ids - torch.arange(vocab),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }


def eagle3_config(architecture: str, **changed: Any) -> Config:
    return SHAPE | {
        "architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": 100, "tie_word_embeddings": False,
    } | changed  # fmt: skip


def first_eagle3(target: Target) -> Made:
    config = eagle3_config("LlamaForCausalLMEagle3")
    return Made(config, eagle3_tensors(target), pickled="pytorch_model.bin")


def angelslim_eagle3(target: Target) -> Made:
    block = {"eagle_aux_hidden_state_layer_ids": [0, 2], "use_aux_hidden_state": True}
    config = eagle3_config("Eagle3LlamaForCausalLM", eagle_config=block)
    return Made(config, eagle3_tensors(target))


def vision_eagle3(target: Target) -> Made:
    """Rotary sections of text, height and width, which are one for text."""
    sections = {"mrope_section": [2, 1, 1], "rope_type": "default", "type": "default"}
    config = eagle3_config(
        "Eagle3Qwen2_5vlForCausalLM", rope_scaling=sections, target_model_type="qwen2_5_vl",
        image_token_id=5,
    )  # fmt: skip
    return Made(config, eagle3_tensors(target))


def sliding_eagle3(target: Target) -> Made:
    """As vLLM's Llama reads a window. The target's further kinds may follow."""
    kinds = ["sliding_attention", "full_attention"]
    config = eagle3_config("LlamaForCausalLMEagle3", layer_types=kinds, sliding_window=WINDOW)
    return Made(config, eagle3_tensors(target))


def redhat_eagle3(target: Target) -> Made:
    """Layers of Qwen3, with norms of queries and keys."""
    layer = SHAPE | {"model_type": "qwen3", "num_hidden_layers": 1, "attention_bias": False}
    config = speculators_config("eagle3", ["Eagle3Speculator"], layer) | {
        "draft_vocab_size": 100, "norm_before_residual": True, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None, "embed_requires_grad": False,
    }  # fmt: skip
    tensors = eagle3_tensors(target, "layers.0.", norms=True)
    embeddings = target.embed(torch.arange(VOCAB)).clone()
    return Made(config, tensors | {"embed_tokens.weight": embeddings})


LATENT: Config = {
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip


def latent_eagle3(target: Target) -> Made:
    """Of Kimi-K2, with DeepSeek's attention."""
    config = eagle3_config(
        "Eagle3DeepseekV2ForCausalLM", num_key_value_heads=4, draft_vocab_size=VOCAB, **LATENT
    )
    del config["head_dim"]
    noise, prefix = Noise(12), "midlayer.self_attn."
    shapes = {
        "q_a_proj": (12, 2 * SIZE), "q_b_proj": (4 * 16, 12),
        "kv_a_proj_with_mqa": (16 + 8, 2 * SIZE), "kv_b_proj": (4 * (8 + 12), 16),
        "o_proj": (SIZE, 4 * 12),
    }  # fmt: skip
    tensors = {f"{prefix}{name}.weight": noise.matrix(*shape) for name, shape in shapes.items()}
    tensors |= {
        f"{prefix}q_a_layernorm.weight": noise.gains(12),
        f"{prefix}kv_a_layernorm.weight": noise.gains(16),
        "midlayer.input_layernorm.weight": noise.gains(SIZE),
        "midlayer.post_attention_layernorm.weight": noise.gains(SIZE),
    }
    tensors |= mlp_tensors(noise, "midlayer.mlp.")
    return Made(config, tensors | eagle3_rest(noise, "midlayer.", VOCAB))


def eagle3_reference(
    config: Config, tensors: Tensors, target: Target, text: list[int], drafted: list[int]
) -> torch.Tensor:
    layers = config.get("eagle_aux_hidden_state_layer_ids") or default_taps(target.num_layers)
    if outputs := config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids"):
        layers = [layer + 1 for layer in outputs]
    taps = tapped_states(target, text, tuple(layers))
    if "input_norm.weight" in tensors:
        taps = plain.rms(taps, tensors["input_norm.weight"])
    if config.get("fc_norm"):
        parts = enumerate(taps.chunk(len(layers), dim=-1))
        normed = [plain.rms(part, tensors[f"fc_norm.{index}.weight"]) for index, part in parts]
        taps = torch.cat(normed, dim=-1)
    prefix = "layers.0." if "layers.0.hidden_norm.weight" in tensors else "midlayer."

    def step(
        embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = plain.rms(states, tensors[f"{prefix}hidden_norm.weight"])
        embeds = plain.rms(embeds, tensors[f"{prefix}input_layernorm.weight"])
        mixed, name = torch.cat([embeds, normed], dim=-1), f"{prefix}self_attn."
        if "kv_lora_rank" in config:
            attended = plain.latent_attention(mixed, positions, tensors, name, config)
        else:
            slides = "sliding_attention" in (config.get("layer_types") or ())
            window = config["sliding_window"] if slides else None
            attended = plain.plain_attention(mixed, positions, tensors, name, WIDTH, window=window)
        out = (normed if config.get("norm_before_residual") else states) + attended
        inner = plain.rms(out, tensors[f"{prefix}post_attention_layernorm.weight"])
        out = out + plain.mlp(inner, tensors, f"{prefix}mlp.")
        for layer in range(1, config.get("num_hidden_layers", 1)):
            out = plain.layer(out, positions, tensors, f"layers.{layer}.", WIDTH)
        read = plain.rms(out, tensors["norm.weight"])
        return read, read if config.get("norm_output") else out

    read = plain.chain(step, target.embed, plain.linear(taps, tensors, "fc"), text, drafted)
    return read @ tensors["lm_head.weight"].T


# Medusa


def medusa_tensors(*, heads: int = 5, layers: int = 1, tables: bool = True) -> Tensors:
    """Under the names of the original trainer."""
    noise, tensors = Noise(21), {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = noise.matrix(SIZE, SIZE)
            tensors[f"{head}.{layer}.linear.bias"] = 0.2 * noise.randn(SIZE)
        if tables:
            tensors[f"{head}.{layers}.weight"] = noise.matrix(VOCAB, SIZE)
    return tensors


def first_medusa(target: Target) -> Made:
    """FasterDecoding's v1.3: pickled, 5 heads where the config has 2."""
    config = {
        "medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "vicuna",
        "transformers_version": "4.31.0",
    }  # fmt: skip
    return Made(config, medusa_tensors(), pickled="medusa_lm_head.pt")


def tgi_medusa(target: Target) -> Made:
    config = {
        "medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "vicuna",
    }  # fmt: skip
    return Made(config, medusa_tensors(heads=3), stored="medusa_lm_head.safetensors")


def medusa_reference(
    config: Config, tensors: Tensors, target: Target, text: list[int], drafted: list[int]
) -> torch.Tensor:
    layers, logits = config["medusa_num_layers"], []
    for head in range(len(drafted)):
        state = final_states(target, text)[-1]
        for layer in range(layers):
            inner = plain.linear(state, tensors, f"{head}.{layer}.linear")
            state = state + torch.nn.functional.silu(inner)
        logits.append(tensors.get(f"{head}.{layers}.weight", table(target)) @ state)
    return torch.stack(logits)


# MLP speculators


def ibm(target: Target, *, tied: bool, scaled: bool = False) -> Made:
    noise, inner, depths = Noise(31), 24, 3
    tensors: Tensors = {}
    for depth in range(depths):
        own = 0 if tied else depth
        if own == depth:
            tensors |= {
                f"emb.{depth}.weight": noise.matrix(VOCAB, inner),
                f"ln.{depth}.weight": noise.gains(inner),
                f"ln.{depth}.bias": 0.2 * noise.randn(inner),
                f"head.{depth}.weight": noise.matrix(VOCAB, inner),
            }
        if depth < 2 or not tied:
            width = SIZE if depth == 0 else inner
            tensors[f"proj.{depth}.weight"] = noise.matrix(inner, width)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
        "emb_dim": SIZE, "inner_dim": inner, "n_candidates": 5, "n_predict": depths,
        "scale_input": scaled, "tie_weights": tied, "top_k_tokens_per_head": [4, 3, 2],
        "vocab_size": VOCAB,
    }  # fmt: skip
    return Made(config, {f"speculator.{name}": tensor for name, tensor in tensors.items()})


def gelu(states: torch.Tensor) -> torch.Tensor:
    return states * 0.5 * (1 + torch.erf(states / math.sqrt(2)))


def begun(config: Config, target: Target, text: list[int]) -> torch.Tensor:
    state = final_states(target, text)[-1]
    return plain.rms(state, 1.0) / math.sqrt(2) if config["scale_input"] else state


def mixing(config: Config, inner: int) -> float:
    weight = 0.5 ** (0.5 / config["n_predict"])
    return math.sqrt((1 - weight**2) * (inner / 2)) / weight


def mlp_reference(
    config: Config, tensors: Tensors, target: Target, text: list[int], drafted: list[int]
) -> torch.Tensor:
    named = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
    # Snowflake's modules are sequences of one.
    named = {
        name.replace(".0.weight", ".weight") if name.count(".") == 3 else name: tensor
        for name, tensor in named.items()
    }
    named = {
        name.replace(".0.bias", ".bias") if name.count(".") == 3 else name: tensor
        for name, tensor in named.items()
    }

    def of(module: str, depth: int, kind: str = "weight") -> torch.Tensor:
        depths = [int(name.split(".")[1]) for name in named if name.startswith(f"{module}.")]
        return named[f"{module}.{min(depth, max(depths))}.{kind}"]

    state, logits, tokens = begun(config, target, text), [], [text[-1], *drafted]
    inner = int(config["inner_dim"])
    for depth in range(len(drafted)):
        mixed = of("proj", depth) @ state + mixing(config, inner) * of("emb", depth)[tokens[depth]]
        state = gelu(plain.rms(mixed, of("ln", depth)) + of("ln", depth, "bias"))
        logits.append(of("head", depth) @ state)
    return torch.stack(logits)


def snowflake(target: Target) -> Made:
    """Arctic: sizes as text, all depths tied."""
    noise, inner = Noise(33), 24
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
        "method": "sum_rnn", "input_hidden_dim": SIZE, "emb_dim": str(inner),
        "inner_dim": str(inner), "proj_dim": str(inner), "n_candidates": 3, "n_predict": 3,
        "scale_input": True, "tie_weights": True, "tie_lstm_embs": True,
        "top_k_tokens_per_head": [1, 1, 1], "vocab_size": VOCAB,
    }  # fmt: skip
    tensors = {
        "emb.0.0.weight": noise.matrix(VOCAB, inner),
        "proj.0.0.weight": noise.matrix(inner, SIZE),
        "proj.1.0.weight": noise.matrix(inner, inner),
        "ln.0.0.weight": noise.gains(inner),
        "ln.0.0.bias": 0.2 * noise.randn(inner),
        "head.0.weight": noise.matrix(VOCAB, inner),
    }
    return Made(config, tensors)


LAYOUTS = [
    Layout("EAGLE-1, SafeAILab", "eagle1", safeailab, eagle1_reference),
    Layout("EAGLE-1, SafeAILab Qwen2", "eagle1", safeailab_qwen2, eagle1_reference),
    Layout("EAGLE-1, lmsys", "eagle1", lmsys_eagle, eagle1_reference),
    Layout("EAGLE-1 and HASS, speculators", "eagle1", redhat_eagle, redhat_reference),
    Layout(
        "EAGLE-1 with `layernorms`, speculators", "eagle1", redhat_eagle_norms, normed_reference
    ),
    Layout("EAGLE-3, its authors", "eagle3", first_eagle3, eagle3_reference),
    Layout("EAGLE-3, AngelSlim", "eagle3", angelslim_eagle3, eagle3_reference),
    Layout("EAGLE-3, speculators", "eagle3", redhat_eagle3, eagle3_reference),
    Layout("EAGLE-3 with a sliding window", "eagle3", sliding_eagle3, eagle3_reference),
    Layout("EAGLE-3 of vision models", "eagle3", vision_eagle3, eagle3_reference),
    Layout("EAGLE-3 of DeepSeek and Kimi", "eagle3", latent_eagle3, eagle3_reference),
    Layout("Medusa, FasterDecoding", "medusa", first_medusa, medusa_reference),
    Layout("Medusa, TGI", "medusa", tgi_medusa, medusa_reference),
    Layout("MLP speculator, IBM tied", "mlp", partial(ibm, tied=True, scaled=True), mlp_reference),
    Layout("MLP speculator, IBM", "mlp", partial(ibm, tied=False), mlp_reference),
    Layout("MLP speculator, Snowflake", "mlp", snowflake, mlp_reference),
    Layout("DFlash, z-lab", "dflash", zlab, dflash_reference),
    Layout("DFlash, z-lab gpt-oss", "dflash", zlab_gpt_oss, dflash_reference),
    Layout("DFlash, z-lab sliding windows", "dflash", zlab_sliding, sliding_reference),
    Layout("DFlash, Xiaomi", "dflash", xiaomi_swa, swa_reference),
    Layout("DFlash, speculators", "dflash", redhat_dflash, dflash_reference),
]


# Layouts whose folders other tests make: heads/test_shipped_mtp.py, heads/test_appended_mtp.py,
# heads/test_peagle.py, blocks/test_block_drafters.py, lm/test_draft_lm.py.
ELSEWHERE = (
    ("MTP, DeepSeek-V3, FP8 with scales or not", "mtp"),
    ("MTP, GLM-4.5 to 4.7 and GLM-4.7-Flash", "mtp"),
    ("MTP, Qwen3-Next and Qwen3.5", "mtp"),
    ("MTP, Ernie-4.5", "mtp"),
    ("MTP, MiMo-7B", "mtp"),
    ("MTP, speculators", "mtp"),
    ("P-EAGLE, its trainers", "p-eagle"),
    ("DSpark, its authors", "dspark"),
    ("a causal LM of transformers", "draft-lm"),
)


PAGE = Path(__file__).parents[1] / "docs" / "drafts.md"
ABOVE = """# Published drafts

Drafts that others made are read as they are published: `--draft` takes the folder or Hub id. The family follows from `config.json`,
`speculators_model_type` or the tensors; an architecture that is none of these, and no causal LM of transformers, is refused by its name.
Each layout is tested as a miniature folder with the published names (`tests/published_drafts.py`), against the published formulas in plain torch.

"""
BELOW = """
Not read, and refused by a sentence: more than one MTP module, but for DeepSeek-V3 and GLM-4.5; DFlash with attention sinks or scaled values; LSTM speculators.
A GPTQ or AWQ draft LM needs its library, which the refusal names.

This page is written by `python -m tests.published_drafts`.
"""


def by_family() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, family in [*((one.name, one.family) for one in LAYOUTS), *ELSEWHERE]:
        found.setdefault(family, []).append(name)
    return found


def page() -> str:
    rows = [
        "| family | layouts that are read, served, evaluated and trained further |",
        "|---|---|",
        *(f"| `{family}` | {'; '.join(names)} |" for family, names in by_family().items()),
    ]
    return ABOVE + "\n".join(rows) + "\n" + BELOW


if __name__ == "__main__":
    PAGE.write_text(page())
