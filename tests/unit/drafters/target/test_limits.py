"""Where transformers keeps the kind of rotary embedding, and up to which length each kind is the
same in every pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.drafters.target.limits import lengthen, rope_limit
from draftsmith.errors import UserError

LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "rope_theta": 1e4,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
FOUND: dict[str, tuple[dict[str, Any], tuple[str, int] | None]] = {
    "long": (
        {"rope_parameters": {**LONG, "original_max_position_embeddings": 32}},
        ("longrope", 32),
    ),
    "told outside": (
        {"rope_parameters": LONG, "original_max_position_embeddings": 64},
        ("longrope", 64),
    ),
    "told nowhere": ({"rope_parameters": LONG}, ("longrope", 256)),
    "the old name": (
        {"rope_scaling": {**LONG, "original_max_position_embeddings": 32}},
        ("longrope", 32),
    ),
    "the old key": (
        {"rope_scaling": {"type": "su", "original_max_position_embeddings": 32}},
        ("su", 32),
    ),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ("dynamic", 256)),
    "one kind of layer": (
        {
            "rope_parameters": {
                "full_attention": {**LONG, "original_max_position_embeddings": 32},
                "sliding_attention": PLAIN,
            }
        },
        ("longrope", 32),
    ),
    "the tightest layer": (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic", "factor": 2.0},
                "sliding_attention": {**LONG, "original_max_position_embeddings": 16},
            }
        },
        ("longrope", 16),
    ),
    "none": ({}, None),
    "nothing said": ({"rope_parameters": None}, None),
}


@pytest.mark.parametrize("case", FOUND)
def test_a_kind_is_found_wherever_it_stands(case):
    values, expected = FOUND[case]
    assert rope_limit(SimpleNamespace(max_position_embeddings=256, **values)) == expected


def test_it_is_found_in_a_configuration_as_transformers_reads_it():
    shape = {"max_position_embeddings": 256, "hidden_size": 32, "num_attention_heads": 4}
    long = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = AutoConfig.for_model(
        "phi3", **shape, rope_scaling=long, original_max_position_embeddings=32
    )
    assert rope_limit(config) == ("longrope", 32)
    config = AutoConfig.for_model("llama", **shape, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert rope_limit(config) == ("dynamic", 256)
    assert rope_limit(AutoConfig.for_model("llama", **shape)) is None


def test_layers_of_one_kind_alone_are_lengthened():
    """gemma3 keeps frequencies by kind of layer."""
    long = {**LONG, "original_max_position_embeddings": 32}
    config = AutoConfig.for_model(
        "gemma3_text", num_hidden_layers=2, hidden_size=32, head_dim=8, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32, vocab_size=32, max_position_embeddings=256,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"full_attention": long, "sliding_attention": PLAIN},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    rotary = model.model.rotary_emb
    before = rotary.full_attention_inv_freq.clone(), rotary.sliding_attention_inv_freq.clone()
    assert not lengthen(model, 32)
    assert lengthen(model, 33)
    torch.testing.assert_close(rotary.full_attention_inv_freq, before[0] / 2)
    assert torch.equal(rotary.sliding_attention_inv_freq, before[1])
    rotary(torch.zeros(1, 1, 32), torch.arange(4)[None], "full_attention")
    torch.testing.assert_close(rotary.full_attention_inv_freq, before[0] / 2)
    assert rope_limit(config) == ("longrope", 32) and rope_limit(config, lengthened=33) is None


def test_the_refusal_names_the_value_and_the_limit():
    limit = rope_limit(
        SimpleNamespace(max_position_embeddings=256, rope_parameters={"rope_type": "dynamic"})
    )
    limit.check(256, "model", "max_length")
    with pytest.raises(
        UserError, match=r"^max_length is 257: 'model' has rope_type 'dynamic'.*at most 256$"
    ):
        limit.check(257, "model", "max_length")
