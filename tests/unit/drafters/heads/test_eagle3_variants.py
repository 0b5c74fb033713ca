"""EAGLE-3 drafts with other norms, biases and more layers, as vLLM defines them, against a plain
reading of that definition."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import UnrollBatch
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from tests.first_rounds import first_round

HIDDEN, HEADS, KEY_HEADS, WIDTH, INNER, VOCAB, EPS = 32, 4, 2, 8, 40, 288, 1e-6
TAPS = (1, 3)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_fc, nested": {"eagle_config": {"norm_before_fc": True}},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "bias": {"attention_bias": True},
    "three layers": {"num_hidden_layers": 3},
    "everything": {
        "norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True,
        "attention_bias": True,
        "num_hidden_layers": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return Target.load(tiny_target("llama"), dtype=torch.float64)


def config_of(variant: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS,
        "head_dim": WIDTH,
        "hidden_act": "silu", "rms_norm_eps": EPS, "max_position_embeddings": 256,
        "rope_theta": 10000.0, "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB, "target_hidden_size": HIDDEN,
        "eagle_aux_hidden_state_layer_ids": list(TAPS), **variant,
    }  # fmt: skip


def tensors_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor that vLLM's loader would fill, under the names it knows."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(TAPS) * HIDDEN), "norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }  # fmt: skip
    if config.get("norm_before_fc") or config.get("eagle_config", {}).get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(TAPS) * HIDDEN,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(len(TAPS))}
    for layer in range(config["num_hidden_layers"]):
        size = 2 * HIDDEN if layer == 0 else HIDDEN
        rows = {"q": HEADS * WIDTH, "k": KEY_HEADS * WIDTH, "v": KEY_HEADS * WIDTH}
        name = f"layers.{layer}."
        shapes |= {
            f"{name}self_attn.{part}_proj.weight": (count, size) for part, count in rows.items()
        }
        shapes[f"{name}self_attn.o_proj.weight"] = (HIDDEN, HEADS * WIDTH)
        if config.get("attention_bias"):
            shapes |= {
                f"{name}self_attn.{part}_proj.bias": (count,)
                for part, count in {**rows, "o": HIDDEN}.items()
            }
        shapes |= {f"{name}mlp.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
        shapes[f"{name}mlp.down_proj.weight"] = (HIDDEN, INNER)
        # vLLM builds the hidden norm in every layer and uses it in the first.
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        shapes |= {f"{name}{norm}.weight": (HIDDEN,) for norm in norms}
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        made[name] = (
            1 + 0.3 * noise
            if "norm" in name
            else noise * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
        )
    return made


def write(folder: Path, variant: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = config_of(variant)
    tensors = tensors_of(config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return config, tensors


def rms(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPS)


def rotated(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T, heads, D], NeoX style."""
    angles = positions[:, None] * 10000.0 ** (
        -torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attended(
    config: dict[str, Any], part: dict[str, torch.Tensor], mixed: torch.Tensor
) -> torch.Tensor:
    """Causal attention of one sequence [T, .] -> [T, H]."""
    length = len(mixed)
    positions = torch.arange(length, dtype=torch.float64)

    def project(name: str, states: torch.Tensor) -> torch.Tensor:
        return states @ part[f"self_attn.{name}_proj.weight"].T + part.get(
            f"self_attn.{name}_proj.bias", 0.0
        )

    query = rotated(project("q", mixed).view(length, HEADS, WIDTH), positions)
    key = rotated(project("k", mixed).view(length, KEY_HEADS, WIDTH), positions).repeat_interleave(
        HEADS // KEY_HEADS, dim=1
    )
    value = (
        project("v", mixed)
        .view(length, KEY_HEADS, WIDTH)
        .repeat_interleave(HEADS // KEY_HEADS, dim=1)
    )
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(WIDTH)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return project("o", torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1))


def definition(
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    embeds: torch.Tensor,
    taps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's forward over one sequence of true states: (logits [T, V], states fed back [T, H])."""
    if "input_norm.weight" in tensors:
        taps = rms(taps, tensors["input_norm.weight"])
    if config.get("fc_norm"):
        chunks = taps.chunk(len(TAPS), dim=-1)
        taps = torch.cat(
            [rms(chunk, tensors[f"fc_norm.{index}.weight"]) for index, chunk in enumerate(chunks)],
            dim=-1,
        )
    hidden, residual = taps @ tensors["fc.weight"].T, torch.zeros(())
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        part = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        if layer == 0:
            normed = rms(hidden, part["hidden_norm.weight"])
            residual = normed if config.get("norm_before_residual") else hidden
            mixed = torch.cat([rms(embeds, part["input_layernorm.weight"]), normed], dim=-1)
        else:
            residual = hidden + residual
            mixed = rms(residual, part["input_layernorm.weight"])
        residual = attended(config, part, mixed) + residual
        mixed = rms(residual, part["post_attention_layernorm.weight"])
        gate, up = mixed @ part["mlp.gate_proj.weight"].T, mixed @ part["mlp.up_proj.weight"].T
        hidden = (torch.nn.functional.silu(gate) * up) @ part["mlp.down_proj.weight"].T
    residual = hidden + residual
    normed = rms(residual, tensors["norm.weight"])
    return normed @ tensors["lm_head.weight"].T, normed if config.get("norm_output") else residual


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_a_draft_made_elsewhere_is_what_it_says(name, target, tmp_path):
    config, tensors = write(tmp_path, VARIANTS[name])
    drafter = checkpoint.load(tmp_path, target)
    assert isinstance(drafter, Eagle3)
    ids = torch.randint(3, VOCAB, (1, 14), generator=torch.Generator().manual_seed(1))
    taps, _ = target.states(ids, torch.ones_like(ids), TAPS)
    expected, fed_back = definition(config, tensors, target.embed(ids[0, 1:]), taps[0, :-1])
    batch = UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=2)
    first, _ = drafter.unroll(batch)
    torch.testing.assert_close(
        first.hidden[0, :-1] @ drafter.head_weight().T, expected, rtol=1e-5, atol=1e-5
    )
    step = drafter.step(
        drafter.embed(ids[:, 1:]),
        drafter.fuse(taps[:, :-1]),
        torch.arange(13)[None],
        FullAttention(),
    )
    torch.testing.assert_close(step.next_hidden[0], fed_back, rtol=1e-5, atol=1e-5)
    if name != "plain":
        plain = definition(
            config_of({}), tensors_of(config_of({})), target.embed(ids[0, 1:]), taps[0, :-1]
        )
        difference = max(
            float((one - other).abs().max())
            for one, other in zip(plain, (expected, fed_back), strict=True)
        )
        assert difference > 0.05, "the variant must change something"
    checkpoint.save(drafter, tmp_path / "again", target)
    (again, _) = checkpoint.load(tmp_path / "again", target).unroll(batch)
    torch.testing.assert_close(again.hidden, first.hidden)


@torch.no_grad()
def test_several_layers_draft_as_they_are_unrolled(target, tmp_path):
    """Each layer has its own keys, in the pool as in the unroll."""
    write(tmp_path, {"num_hidden_layers": 3})
    drafter = checkpoint.load(tmp_path, target)
    text = torch.randint(3, VOCAB, (9,), generator=torch.Generator().manual_seed(2))
    proposal = drafter.propose(first_round(drafter, target, [text.tolist()], [3]))
    whole = torch.cat([text, proposal.tokens[0]])[None]
    taps, _ = target.states(whole, torch.ones_like(whole), TAPS)
    steps = drafter.unroll(
        UnrollBatch(input_ids=whole, attention_mask=torch.ones_like(whole), taps=taps, num_steps=3)
    )
    for depth, step in enumerate(steps):
        expected = step.hidden[0, 7 + depth] @ drafter.head_weight().T
        torch.testing.assert_close(
            proposal.logits[0, depth].double().softmax(-1),
            expected.softmax(-1),
            atol=1e-5,
            rtol=1e-4,
        )


class FullAttention:
    """Plain causal attention without a cache."""

    def attend(self, layer, query, key, value, rule):
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=rule.scaling, enable_gqa=True
        )
        return output.transpose(1, 2)


@pytest.mark.parametrize("architecture", ["Eagle3Speculator", "Eagle3DraftModel"])
@torch.no_grad()
def test_the_speculators_layout_is_read_back(architecture, target, tmp_path):
    """Its layer's config is nested, and a missing `norm_before_residual` means true there. Its
    trainer writes the second name."""
    write(tmp_path, {"norm_before_residual": True})
    ids = torch.randint(3, VOCAB, (1, 14), generator=torch.Generator().manual_seed(1))
    taps, _ = target.states(ids, torch.ones_like(ids), TAPS)
    batch = UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=1)
    (portable,) = checkpoint.load(tmp_path, target).unroll(batch)
    flat = config_of({})
    config = {
        "architectures": [architecture], "speculators_model_type": "eagle3",
        "draft_vocab_size": VOCAB,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": flat.pop("eagle_aux_hidden_state_layer_ids"),
    }  # fmt: skip
    for name in ("architectures", "draft_vocab_size", "target_hidden_size"):
        flat.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformer_layer_config": flat}))
    (nested,) = checkpoint.load(tmp_path, target).unroll(batch)
    torch.testing.assert_close(nested.hidden, portable.hidden)


def test_new_drafts_of_3_1(target, tmp_path):
    options = Eagle3Options(fc_norm=True, norm_output=True, norm_before_residual=True)
    drafter = Eagle3.create(options, target, seed=0)
    drafter.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert [
        config[key] for key in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
    ] == [True] * 3 + [False]
    assert Eagle3.load(tmp_path, target).norms == drafter.norms
