"""EAGLE-1 and MTP modules as the `speculators` library loads them: names, configuration, and the
same drafts when read back. tests/e2e/test_speculators.py loads them with the library itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.draft_shape import llama_config, shape_of
from draftsmith.drafters.heads.eagle1 import Eagle1
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from tests.noise import noisy
from tests.unit.train.export import conftest
from tests.unit.train.export.conftest import saved, unrolled

Find = Callable[..., str]
export = partial(conftest.export, to="speculators")
LAYER = "transformer."


def noised(drafter: TrainedDrafter, of: Target, folder: Path) -> Path:
    """A saved draft whose weights no default gives."""
    checkpoint.save(noisy(drafter, 1, 0.1), folder, of)
    return folder


def eagle1(of: Target, folder: Path, **kind: Any) -> Path:
    return noised(Eagle1(llama_config(shape_of(of)), of, **kind), of, folder)


def edited(draft: Path, config: dict[str, Any], **tensors: torch.Tensor) -> Path:
    write_json(draft / "config.json", read_json(draft / "config.json") | config)
    weights = draft / "model.safetensors"
    save_file(load_file(weights) | tensors, weights, metadata={"format": "pt"})
    return draft


def assert_same_draft(draft: Path, out: Path, of: Target) -> None:
    """Read as published, without our record of it."""
    (out / "draftsmith.json").unlink()
    for own, exported in zip(unrolled(draft, of), unrolled(out, of), strict=True):
        torch.testing.assert_close(own, exported, rtol=0, atol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layernorms", [False, True])
def test_eagle1_is_the_type_eagle(
    bias: bool, layernorms: bool, target: Target, tmp_path: Path
) -> None:
    draft = eagle1(target, tmp_path / "draft", bias=bias, layernorms=layernorms)
    out = export(draft)
    config, tensors = read_json(out / "config.json"), load_file(out / "model.safetensors")
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle"
    assert config["architectures"] == ["EagleSpeculator", "LlamaDecoderLayer"]
    assert config["transformer_layer_architecture"] == "LlamaDecoderLayer"
    assert (config["fusion_bias"], config["layernorms"]) == (bias, layernorms)
    assert config["transformer_layer_config"]["model_type"] == "llama"
    norms = {"embedding_layernorm", f"{LAYER}input_layernorm", "pre_lm_head_layernorm"}
    others = {name for name in tensors if not name.startswith((f"{LAYER}self_attn", f"{LAYER}mlp"))}
    assert others == {
        "fusion_fc.weight",
        f"{LAYER}post_attention_layernorm.weight",
        *(["fusion_fc.bias"] if bias else []),
        *([f"{name}.weight" for name in norms] if layernorms else []),
    }
    assert "speculators" in (out / "README.md").read_text()
    assert "vllm serve" not in (out / "README.md").read_text()
    assert_same_draft(draft, out, target)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_without_the_norms_get_no_eagle1_with_them(
    engine: str, target: Target, tmp_path: Path
) -> None:
    draft = eagle1(target, tmp_path / "draft", layernorms=True)
    with pytest.raises(UserError, match="layernorms=True, norms that"):
        export(draft, to=engine)


def test_eagle1_before_the_library_converted_it_is_read(target: Target, tmp_path: Path) -> None:
    """The names of the norms in the folders that the library's converter takes."""
    draft = eagle1(target, tmp_path / "draft", layernorms=True)
    before = unrolled(draft, target)
    names = {
        "embedding_layernorm.weight": "embed_layernorm.weight",
        "layers.0.input_layernorm.weight": "hidden_layernorm.weight",
        "pre_lm_head_layernorm.weight": "lm_head_layernorm.weight",
    }
    tensors = load_file(draft / "model.safetensors")
    renamed = {names.get(name, name): tensor for name, tensor in tensors.items()}
    save_file(renamed, draft / "model.safetensors", metadata={"format": "pt"})
    config = read_json(draft / "config.json")
    del config["layernorms"]
    write_json(draft / "config.json", config)
    for own, read in zip(before, unrolled(draft, target), strict=True):
        torch.testing.assert_close(own, read, rtol=0, atol=0)


def test_eagle1_with_a_copy_of_the_targets_embeddings_leaves_it_out(
    target: Target, tmp_path: Path
) -> None:
    table = target.embed(torch.arange(target.vocab_size)).detach().clone()
    draft = edited(eagle1(target, tmp_path / "draft"), {}, **{"embed_tokens.weight": table})
    assert "embed_tokens.weight" not in load_file(export(draft) / "model.safetensors")
    with pytest.raises(UserError, match="the draft has embeddings of its own"):
        export(edited(draft, {}, **{"embed_tokens.weight": 2 * table}))


@pytest.mark.parametrize(
    ("key", "value"), [("rope_theta", 77.0), ("rope_scaling", {"rope_type": "linear", "factor": 2})]
)
def test_eagle1_turned_otherwise_than_its_target_is_refused(
    key: str, value: Any, target: Target, tmp_path: Path
) -> None:
    draft = edited(eagle1(target, tmp_path / "draft"), {key: value})
    with pytest.raises(UserError, match=f"the draft has {key}=.*the speculators library would run"):
        export(draft)


def test_eagle1_of_a_target_with_partial_rotation_is_refused(
    tiny_target: Find, tmp_path: Path
) -> None:
    other = Target.load(tiny_target("gpt_neox"), dtype=torch.float32)
    with pytest.raises(UserError, match="partial rotary embedding or one for each kind of layer"):
        export(eagle1(other, tmp_path / "draft"))


def test_a_module_beside_a_target_with_an_older_file_is_exported(
    tiny_target: Find, tmp_path: Path
) -> None:
    """Published Qwen3 folders have `rope_theta` at the top."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target("qwen3"), folder)
    config = read_json(folder / "config.json")
    del config["rope_parameters"]
    write_json(folder / "config.json", config | {"rope_theta": 1e6, "rope_scaling": None})
    of = Target.load(str(folder), dtype=torch.float32)
    draft = saved("mtp", of, tmp_path / "draft")
    written = read_json(export(draft, to="vllm") / "config.json")
    assert written["rope_theta"] == 1e6


@pytest.mark.parametrize("kind", ["llama", "qwen3", "ernie4_5_moe"])
def test_modules_that_the_library_does_not_make_are_refused(
    kind: str, tiny_target: Find, tmp_path: Path
) -> None:
    of = Target.load(tiny_target(kind), dtype=torch.float32)
    draft = saved("mtp", of, tmp_path / "draft")
    made_of = kind if kind == "ernie4_5_moe" else "llama"
    with pytest.raises(UserError, match=f"layers of qwen3, .* is a layer of '{made_of}'"):
        export(draft)
