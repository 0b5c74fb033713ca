"""EAGLE-3 exports: what is written, what is refused, and what vLLM and SGLang would
read from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from tests.unit.train.export.conftest import export, saved

VOCAB, HIDDEN = 288, 32  # of tiny_target("llama"), which has 4 layers


@pytest.fixture
def make_draft(
    tmp_path: Path, target: Target, tiny_target: Callable[..., str]
) -> Callable[..., Path]:
    """`make_draft(change)` writes an EAGLE-3 checkpoint after `change(config, tensors)`."""

    def draft(
        change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object] | None = None,
    ) -> Path:
        folder = tmp_path / "draft"
        shutil.rmtree(folder, ignore_errors=True)
        saved("eagle3", target, folder, draft_vocab_size=100, taps=(1, 2, 3))
        config, tensors = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
        if change is not None:
            change(config, tensors)
        write_json(folder / "config.json", config)
        save_file(tensors, folder / "model.safetensors")
        record = {"name": tiny_target("llama"), "vocab_size": VOCAB}
        write_json(
            folder / "draftsmith.json",
            {"schema": 1, "family": "eagle3", "target": record, "evaluation": {}},
        )
        return folder

    return draft


def drop(*names: str) -> Callable[..., None]:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            (tensors if name in tensors else config).pop(name)

    return change


def assign(**values: Any) -> Callable[..., None]:
    return lambda config, tensors: config.update(values)


def replace(name: str, tensor: torch.Tensor) -> Callable[..., None]:
    return lambda config, tensors: tensors.update({name: tensor})


def with_heads(name: str, sizes: dict[str, int], **values: Any) -> Callable[..., None]:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config |= values
        tensors |= {f"midlayer.self_attn.{kind}_{name}": torch.ones(n) for kind, n in sizes.items()}

    return change


@pytest.mark.parametrize(
    "change",
    [drop("eagle_aux_hidden_state_layer_ids"), drop("eagle_config"), drop("num_aux_hidden_states")],
)
def test_layers_are_written_for_both_engines_whichever_was_named(
    make_draft: Callable[..., Path], change: Callable[..., None]
) -> None:
    """vLLM's key counts the inputs of layers, SGLang's their outputs."""
    for engine in ("vllm", "sglang"):
        config = read_json(export(make_draft(change), engine) / "config.json")
        assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
        assert config["num_aux_hidden_states"] == 3


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (drop("draft_vocab_size"), "has shape [100, 32] where its config says [288, 32]"),
        (drop("d2t"), "weight 'd2t' is missing"),
        (assign(eagle_aux_hidden_state_layer_ids=[2, 1, 3]), "taps layers [2, 1, 3]"),
        (
            assign(
                eagle_aux_hidden_state_layer_ids=[3, 2, 1],
                eagle_config={
                    "use_aux_hidden_state": True,
                    "eagle_aux_hidden_state_layer_ids": [2, 1, 0],
                },
            ),
            "taps layers [3, 2, 1]",
        ),
        (
            assign(
                eagle_aux_hidden_state_layer_ids=[1, 2, 4],
                eagle_config={
                    "use_aux_hidden_state": True,
                    "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
                },
            ),
            "from 1 to 3 over",
        ),
        (
            with_heads("norm.weight", {"q": 8, "k": 8}),
            "'Eagle3Qwen3ForCausalLM' is not the portable EAGLE-3 one",
        ),
        (
            with_heads("proj.bias", {"q": 32, "k": 16, "v": 16, "o": 32}, attention_bias=True),
            "attention_bias=True",
        ),
        (replace("fc_norm.0.weight", torch.ones(HIDDEN)), "has no place"),
        (assign(vocab_size=300), "vocab_size=300"),
        (replace("norm.weight", torch.full((HIDDEN,), float("nan"))), "'norm.weight'"),
        (replace("d2t", torch.zeros(100, dtype=torch.int64) - 1), "does not map draft tokens"),
        (replace("d2t", torch.full((100,), VOCAB, dtype=torch.int64)), "does not map draft tokens"),
    ],
)
def test_what_no_engine_could_serve_is_refused_in_one_sentence(
    make_draft: Callable[..., Path], change: Callable[..., None], wanted: str
) -> None:
    draft = make_draft(change)
    with pytest.raises(UserError) as caught:
        export(draft, "vllm")
    assert wanted in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in draft.parent.iterdir()] == ["draft"], (
        "a refused export leaves nothing behind"
    )


def normed(key: str) -> Callable[..., None]:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config[key] = True
        if key == "fc_norm":
            tensors |= {f"fc_norm.{index}.weight": torch.ones(HIDDEN) for index in range(3)}
        if key == "norm_before_fc":
            tensors["input_norm.weight"] = torch.ones(3 * HIDDEN)

    return change


@pytest.mark.parametrize(
    "key", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
)
def test_norms_go_where_they_are_read(make_draft: Callable[..., Path], key: str) -> None:
    draft = make_draft(normed(key))
    assert read_json(export(draft, "vllm") / "config.json")[key] is True
    assert read_json(export(draft, "speculators") / "config.json")[key] is True
    if key == "norm_before_residual":
        with pytest.raises(UserError, match="SGLang cannot express"):
            export(draft, "sglang")
    else:
        assert read_json(export(draft, "sglang") / "config.json")[key] is True


def test_targets_with_scaled_embeddings_need_embeddings_in_the_draft(
    make_draft: Callable[..., Path], tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    target = json.loads((Path(tiny_target("llama")) / "config.json").read_text())
    scaled = {
        **target,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
    }
    (tmp_path / "scaled").mkdir()
    write_json(tmp_path / "scaled" / "config.json", scaled)
    with pytest.raises(UserError, match="scales its token embeddings"):
        export(make_draft(), "vllm", target=str(tmp_path / "scaled"))
    own = make_draft(replace("embed_tokens.weight", torch.zeros(VOCAB, HIDDEN)))
    export(own, "vllm", target=str(tmp_path / "scaled"))
