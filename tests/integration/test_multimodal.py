"""Multimodal checkpoints as they are published, served as the text models in them: greedy text is
that of the full class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import UnrollBatch
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import DraftLmOptions, Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from tests.conftest import SHAPE, make_tokenizer
from tests.integration.served import by_transformers
from tests.noise import spread

CAPTURED, NUM_NEW = True, 12
PROMPTS = [[5, 9, 13, 200, 31], list(range(20, 64))]
# The second prompt is read in pieces, beside the first one's answer.
CONFIG = EngineConfig(
    k=3, max_batch=4, num_blocks=64, block_size=8, max_round_tokens=24, compile="off"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_channels": 3, "image_size": 16, "patch_size": 8,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 8, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    "fullatt_block_indexes": [1], "window_size": 16,
}  # fmt: skip
# Rotary positions of time, height and width.
SECTIONS: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
QWEN3 = {"head_dim": 16, "rope_parameters": {**SECTIONS, "mrope_section": [4, 2, 2]}}
QWEN2 = {"rope_parameters": {**SECTIONS, "mrope_section": [2, 1, 1]}}
# What each kind changes of SHAPE in its text_config, and its vision_config.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (QWEN3, QWEN_VISION),
    "qwen2_5_vl": (QWEN2, QWEN_VISION),
    "mistral3": (
        {"model_type": "mistral", "head_dim": 8},
        {**VISION, "model_type": "pixtral", "head_dim": 8},
    ),
    "gemma3": (
        {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 6},
        {**VISION, "model_type": "siglip_vision_model"},
    ),
    "llama4": (
        {
            "model_type": "llama4_text", "head_dim": 8, "intermediate_size_mlp": 64,
            "num_local_experts": 2, "attention_chunk_size": 8, "floor_scale": 5,
        },
        {
            **VISION, "model_type": "llama4_vision_model", "vision_output_dim": 16,
            "projector_input_dim": 16, "projector_output_dim": 16,
        },
    ),
    "llava": (
        {"model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model", "projection_dim": 16},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Callable[[str], tuple[str, Any]]:
    """`published(kind)` is a folder in the published layout and the full model saved there."""
    made: dict[str, tuple[str, Any]] = {}

    def make(kind: str) -> tuple[str, Any]:
        if kind not in made:
            text, vision = copy.deepcopy(KINDS[kind])
            config = AutoConfig.for_model(
                kind, text_config={**SHAPE, **text}, vision_config=vision, tie_word_embeddings=False
            )
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(config).eval()
            folder: Path = tmp_path_factory.mktemp(kind)
            spread(model).save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
            made[kind] = (str(folder), model)
        return made[kind]

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_the_full_class(published, kind):
    folder, model = published(kind)
    target = Target.load(folder, dtype=torch.float32)
    names = [name for name, _ in target.model.named_parameters()]
    assert not [name for name in names if "vision" in name or "visual" in name or name == "proj"]
    engine = build_engine(target, Suffix(), CONFIG)
    found = [answer.tokens for answer in engine.generate(PROMPTS, GREEDY)]
    expected = [by_transformers(model, prompt, NUM_NEW)[0] for prompt in PROMPTS]
    assert found == expected
    assert target.answer(PROMPTS, max_new_tokens=NUM_NEW, ignore_eos=True) == expected
    assert len({*found[0], *found[1]}) > 4


@pytest.mark.long
def test_drafts_are_trained_and_served_for_the_language_part(published, tmp_path):
    folder, model = published("qwen3_vl")
    target = Target.load(folder, dtype=torch.float32)
    drafter = Eagle3.create(Eagle3Options(), target, seed=1)
    ids = torch.tensor([PROMPTS[1]])
    taps, _ = target.states(ids, torch.ones_like(ids), drafter.taps)
    batch = UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=2)
    loss = sum(step.hidden.float().pow(2).mean() for step in drafter.unroll(batch))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    grads = [own.grad for own in drafter.parameters() if own.grad is not None]
    assert grads and all(torch.isfinite(grad).all() for grad in grads)
    engine = build_engine(target, drafter.eval(), replace(CONFIG, compile="auto"))
    (answer,) = engine.generate(PROMPTS[:1], GREEDY)
    assert answer.tokens == by_transformers(model, PROMPTS[0], NUM_NEW)[0]
    DraftLm.create(DraftLmOptions(target_layers=(0, 3)), target, seed=0).save(tmp_path)
    assert DraftLm.load(tmp_path, target).lm.num_layers == 2
