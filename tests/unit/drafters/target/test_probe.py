"""Which causal LMs are served in place and which are refused, each with its reason. Tiny random
models of many families."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.drafters.target import attention, probe
from draftsmith.drafters.target.attention import register
from draftsmith.drafters.target.causal_lm import end_ids
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import Chunk
from tests.noise import spread

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
LLAMA4 = {
    "attention_chunk_size": 7, "floor_scale": 5, "num_local_experts": 4, "head_dim": 8,
    "intermediate_size_mlp": 64,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "xglm": (
        {"d_model": 32, "num_layers": 4, "attention_heads": 4, "ffn_dim": 64},
        "its code fails",
    ),
    "falcon": ({"alibi": True, "new_decoder_architecture": False}, "its code fails"),
    "git": (
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "image_size": 32,
            }
        },
        "knows no attention named",
    ),
    "xlstm": ({"num_blocks": 4, "num_heads": 4}, "layer 0 has no attention that honours"),
    # Its window of 20 is longer than the text of a probe.
    "phimoe": (
        {
            "sliding_window": 20,
            "num_local_experts": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "hides its sliding window in a mask",
    ),
}


def save_tiny(model_type: str, changes: dict[str, Any], folder) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**SHAPE, "model_type": model_type, **changes})
    )
    spread(model).save_pretrained(folder)


@pytest.mark.parametrize("rope", ROPES)
def test_ropes_that_never_change_are_served_to_their_end(rope, tmp_path):
    save_tiny("llama", {"rope_parameters": {"rope_theta": 1e4, **ROPES[rope]}}, tmp_path)
    target = Target.load(tmp_path)
    assert target.rope_limit is None and target.max_positions == SHAPE["max_position_embeddings"]


@pytest.mark.parametrize("found, refused", [
    (None, "attention of type 'chunked_attention' is not supported"),
    (Chunk(64), "chunks of attention are others than its configuration says"),
])  # fmt: skip
def test_chunks_that_do_not_follow_the_configuration_are_refused(
    found, refused, tmp_path, monkeypatch
):
    """Though a probe's text is shorter than one."""
    save_tiny("llama4_text", LLAMA4 | {"attention_chunk_size": 64}, tmp_path)
    Target.load(tmp_path, dtype=torch.float32)
    monkeypatch.setattr(attention, "chunk_of", lambda module: found)
    with pytest.raises(UserError, match=refused):
        Target.load(tmp_path, dtype=torch.float32)


def test_a_text_behind_others_in_its_pass_is_scaled_as_if_alone(tmp_path):
    """By Llama 4, which counts tokens of the pass, and cut into chunks of its own."""
    save_tiny("llama4_text", LLAMA4, tmp_path)
    target = Target.load(tmp_path, dtype=torch.float32)
    ids = torch.arange(50)[None] % SHAPE["vocab_size"]
    segments = (torch.arange(50) >= 30).long()[None]
    behind = target.states(ids, torch.ones_like(ids), (), segments)[1][:, 30:]
    alone = target.states(ids[:, 30:], torch.ones_like(ids[:, 30:]), ())[1]
    torch.testing.assert_close(behind, alone, atol=1e-5, rtol=1e-5)


def test_a_configuration_that_names_no_end_of_text_has_none():
    text = SimpleNamespace()
    config = SimpleNamespace(get_text_config=lambda: text)
    assert end_ids(None, config) == ()
    text.eos_token_id = 7
    assert end_ids(None, config) == (7,)


class Sways(torch.nn.Module):
    """An innocent name, and a layer's output that depends on `trait` of the whole pass."""

    def __init__(
        self, layer: torch.nn.Module, trait: Callable[[torch.Tensor, torch.Tensor], float]
    ):
        super().__init__()
        self.layer, self.trait = layer, trait

    def forward(self, hidden: torch.Tensor, *inputs: Any, **named: Any) -> Any:
        places = named.get("position_ids")
        places = torch.arange(hidden.shape[1]) if places is None else places
        output = self.layer(hidden, *inputs, **named)
        return output * (1 + 0.1 * self.trait(hidden, places))


TRAITS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], float], str]] = {
    "the longest position": (lambda hidden, places: float(places.max() > 64), "share its pass"),
    "the number of tokens": (lambda hidden, places: float(hidden.shape[1] > 12), "share its pass"),
    "the mean of all tokens": (lambda hidden, places: float(hidden.mean()) * 10, "."),
    "the number of rows": (
        lambda hidden, places: float(hidden.shape[0] > 1),
        "other rows of its batch",
    ),
}


@pytest.mark.parametrize("trait", TRAITS)
def test_a_module_that_looks_at_the_whole_batch_is_refused(trait, tiny_target):
    model = AutoModelForCausalLM.from_pretrained(
        tiny_target("llama"), attn_implementation=register()
    )
    Target(model, "sound")
    sways, reason = TRAITS[trait]
    model.model.layers[1] = Sways(model.model.layers[1], sways)
    with pytest.raises(UserError, match=f"cannot be served: .*{reason}") as caught:
        Target(model, "unsound")
    assert "\n" not in str(caught.value)


def test_a_module_that_keeps_something_of_earlier_passes_is_refused(tiny_target):
    """A cache of frequencies that grows and never shrinks: each pass by itself is sound."""
    model = AutoModelForCausalLM.from_pretrained(
        tiny_target("llama"), attn_implementation=register()
    )
    longest = [0]

    def grown(hidden: torch.Tensor, places: torch.Tensor) -> float:
        longest[0] = max(longest[0], int(places.max()))
        return float(longest[0] > 64)

    model.model.layers[1] = Sways(model.model.layers[1], grown)
    with pytest.raises(UserError, match="share its pass"):
        Target(model, "unsound")


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_with_a_reason(model_type, tmp_path):
    changes, reason = REFUSED[model_type]
    save_tiny(model_type, changes, tmp_path)
    with pytest.raises(UserError, match=reason) as caught:
        Target.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_kind_whose_sampled_text_is_unproven_is_refused(tiny_target, monkeypatch):
    assert "zamba" in probe.UNPROVEN
    monkeypatch.setitem(probe.UNPROVEN, "llama", "not proven here")
    with pytest.raises(UserError, match="not proven here; use another model"):
        Target.load(tiny_target("llama"))


def test_a_pass_that_loses_keys_is_noticed(tiny_target, monkeypatch):
    class Misplaced(PagedPass):
        def attend(self, layer, query, key, value, rule):
            return super().attend(layer, query, key.flip(2), value.flip(2), rule)

    monkeypatch.setattr(probe, "PagedPass", Misplaced)
    with pytest.raises(UserError, match="its paged forward differs from its own"):
        Target.load(tiny_target("llama"))
