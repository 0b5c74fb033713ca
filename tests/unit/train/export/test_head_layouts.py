"""Layouts as engines load them: names, shapes, and the same draft when it is read back. Drafts with
sliding windows are refused where an engine would attend to all of the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from draftsmith.train.export.table import WRITERS
from tests.unit.train.export.conftest import export, saved, unrolled

ENGINES = [
    (family, engine)
    for family, writers in WRITERS.items()
    for engine in writers
    # A repository around the vllm layout, and files of other engines (test_gguf.py,
    # test_openvino.py).
    if engine not in ("gguf", "openvino")
    # Of a target's own block alone: test_own_block_layouts.py, test_speculators_layout.py.
    if (family, engine) not in (("mtp", "sglang"), ("mtp", "speculators"))
]
# The layout has blocks whose slots see each other only.
IN_SPECULATORS = {"dflash": {"causal": False}, "dspark": {"causal": False}}
WINDOW = 4
WINDOWED = {"window": WINDOW, "noise": 0.2}
TAPS = {"taps": (1, 2, 3)}
Make = Callable[..., Path]


@pytest.fixture
def make(target: Target, tmp_path: Path) -> Make:
    def draft(family: str, of: Target = target, **options: Any) -> Path:
        return saved(family, of, tmp_path / family, **options)

    return draft


def without_record(folder: Path) -> Path:
    (folder / "draftsmith.json").unlink()
    return folder


@pytest.mark.parametrize(("family", "engine"), ENGINES)
def test_read_after_write_is_the_identity(family, engine, make, target):
    draft = make(family, **(IN_SPECULATORS.get(family, {}) if engine == "speculators" else {}))
    own = checkpoint.load(draft, target)
    read = checkpoint.load(without_record(export(draft, engine)), target)
    assert type(read) is type(own) and read.taps == own.taps
    state, again = own.state_dict(), read.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
    # SGLang's EAGLE-1 has a bias, and each head of the original Medusa a copy of the table.
    table = target.output_weight
    more = [again[name] for name in again.keys() - state.keys()]
    assert all(torch.equal(one, table) if one.ndim == 2 else not one.any() for one in more)
    if hasattr(own, "portable_config") and again.keys() == state.keys():
        assert read.portable_config() == own.portable_config()


def test_a_bias_that_says_something_is_not_dropped(make, target):
    draft = make("eagle1")
    tensors = load_file(draft / "model.safetensors")
    save_file(
        {**tensors, "fc.bias": torch.ones_like(tensors["fc.weight"][:, 0])},
        draft / "model.safetensors",
    )
    before = unrolled(draft, target)
    with pytest.raises(UserError, match="fc has a bias, which vLLM's EAGLE-1 cannot express"):
        export(draft, "vllm")
    for own, exported in zip(before, unrolled(export(draft, "sglang"), target), strict=True):
        torch.testing.assert_close(own, exported)


def test_eagle1_of_a_target_with_scaled_embeddings_brings_its_own(make, tiny_target):
    gemma = Target.load(tiny_target("gemma"), dtype=torch.float32)
    draft = make("eagle1", gemma)
    assert "embed_tokens.weight" in load_file(export(draft, "vllm") / "model.safetensors")
    tensors = load_file(draft / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, draft / "model.safetensors")
    with pytest.raises(UserError, match="scales its token embeddings"):
        export(draft, "sglang")


def test_a_p_eagle_draft_needs_its_mask_and_an_engine_that_reads_it(make):
    draft = make("p-eagle")
    with pytest.raises(UserError, match="does not read P-EAGLE's mask_hidden"):
        export(draft, "sglang")
    tensors = load_file(draft / "model.safetensors")
    del tensors["mask_hidden"]
    save_file(tensors, draft / "model.safetensors")
    with pytest.raises(UserError, match="'mask_hidden' is missing"):
        export(draft, "vllm")


def test_a_block_that_is_drafted_otherwise_is_refused(make):
    draft = make("dspark")
    config = read_json(draft / "config.json")
    write_json(draft / "config.json", config | {"markov_head_type": "gated"})
    with pytest.raises(UserError, match="has markov_head_type='gated', which"):
        export(draft, "vllm")


@pytest.mark.parametrize(
    ("layers", "words"), [([1, 0], r"taps layers \[2, 1\]"), ([0, 3], "from 1 to 3 over")]
)
def test_layers_that_engines_cannot_hand_over_are_refused(layers, words, make):
    draft = make("dflash")
    config = read_json(draft / "config.json")
    config["dflash_config"]["target_layer_ids"] = layers
    write_json(draft / "config.json", config)
    with pytest.raises(UserError, match=words):
        export(draft, "sglang")


@pytest.mark.parametrize(
    ("family", "key"),
    [("eagle1", "vocab_size"), ("mlp", "vocab_size"), ("mlp", "emb_dim"), ("dflash", "vocab_size")],
)
def test_a_draft_of_another_target_is_refused(family, key, make):
    draft = make(family)
    config = read_json(draft / "config.json")
    write_json(draft / "config.json", config | {key: 7})
    with pytest.raises(UserError, match="needed for"):
        export(draft, next(iter(WRITERS[family])))


@pytest.mark.parametrize(
    ("family", "engine", "options"),
    [
        ("eagle3", "vllm", TAPS),
        ("eagle3", "speculators", TAPS),
        ("p-eagle", "vllm", {"num_hidden_layers": 2}),
        ("p-eagle", "speculators", {"num_hidden_layers": 2}),
        ("draft-lm", "vllm", {}),
        ("draft-lm", "hf", {}),
    ],
)
def test_vllm_and_transformers_read_the_window(
    family: str, engine: str, options: dict[str, Any], make: Make, target: Target
) -> None:
    draft = make(family, **WINDOWED, **options)
    out = export(draft, engine)
    config = read_json(out / "config.json")
    config = config.get("transformer_layer_config", config)
    assert config["sliding_window"] == WINDOW
    assert config["layer_types"] == ["sliding_attention"] * config["num_hidden_layers"]
    for own, read in zip(unrolled(draft, target), unrolled(without_record(out), target)):
        torch.testing.assert_close(own, read)


@pytest.mark.parametrize(
    ("family", "engine", "options"),
    [
        ("eagle3", "sglang", TAPS),
        ("eagle3", "gguf", TAPS),
        ("eagle3", "openvino", TAPS),
        ("eagle1", "vllm", {}),
        ("eagle1", "sglang", {}),
        ("mtp", "vllm", {}),
        ("draft-lm", "sglang", {}),
    ],
)
def test_engines_that_would_attend_to_all_are_refused(
    family: str, engine: str, options: dict[str, Any], make: Make
) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino", reason="the extra [openvino] is not installed")
    if engine == "gguf":
        pytest.importorskip("gguf", reason="the extra [gguf] is not installed")
    draft = make(family, **WINDOWED, **options)
    with pytest.raises(UserError, match=f"sliding_window={WINDOW}, and .* would let it attend"):
        export(draft, engine)
