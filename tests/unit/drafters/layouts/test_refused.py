"""Folders that are no draft, or half a one: one sentence that names the file and the mend, whatever
is wrong."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftsmith.drafters import checkpoint
from draftsmith.drafters.layouts.folder import DraftFolder, is_causal_lm
from draftsmith.drafters.options import OPTIONS, Eagle3Options, MedusaOptions, MlpOptions
from draftsmith.drafters.registry import FAMILIES, family_of
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError

Find = Callable[..., str]


def write(folder: Path, config: Any, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"architectures": ["LlamaForCausalLMEagle9"], "model_type": "llama"},
            "'LlamaForCausalLMEagle9'",
        ),
        ({"architectures": ["HydraModel"], "model_type": "hydra"}, "'HydraModel'"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "'BertForMaskedLM'"),
        ({}, "'unknown'"),
        ({"architectures": "LlamaForCausalLM", "model_type": "llama"}, "'unknown'"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": ["llama"]}, "cannot be read"),
        ({"architectures": ["DFlashDraftModel"], "model_arch": "dflare"}, "a 'dflare' under"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
            "a 'domino' under the architecture 'DFlashDraftModel'",
        ),
        ({"architectures": ["DFlyDraftModel"], "model_type": "qwen3"}, "'DFlyDraftModel'"),
        ({"speculators_model_type": "xpress", "architectures": ["XpressSpeculator"]}, "'xpress'"),
        ({"speculators_model_type": "mlp"}, "'mlp'"),
    ],
)
def test_an_unknown_architecture_is_refused_by_its_name(
    config: dict[str, Any], named: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named) as caught:
        checkpoint.load(write(tmp_path, config, {"x": torch.ones(1)}), target)
    assert "use another draft" in str(caught.value) or "use a draft" in str(caught.value)


def test_the_layer_of_an_unknown_architecture_is_not_taken_for_eagle1(tmp_path: Path) -> None:
    tensors = {"fc.weight": torch.ones(1), "layers.0.mlp.down_proj.weight": torch.ones(1)}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    assert family_of(DraftFolder(write(tmp_path, config, tensors))) == "eagle1"
    with pytest.raises(UserError, match="'DFlareDraftModel'"):
        family_of(DraftFolder(tmp_path, config | {"architectures": ["DFlareDraftModel"]}))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("dspark", {"architectures": ["DSparkDraftModel"]}),
        ("dspark", {"architectures": ["DSparkDraftModel"], "projector_type": "dspark"}),
        ("dspark", {"architectures": ["DFlashDraftModel"], "projector_type": "dspark"}),
        ("dflash", {"architectures": ["DFlashDraftModel"], "model_arch": "dflash"}),
    ],
)
def test_a_block_drafter_is_read_under_other_trainers_names(
    family: str, config: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    """SpecForge's, with the settings of all parts in `dflash_config`."""
    drafter = FAMILIES[family].create(OPTIONS[family](), target, seed=0)
    drafter.save(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    moved = [name for name in values if name.startswith(("markov_", "enable_", "confidence_"))]
    nested = values["dflash_config"] | {name: values.pop(name) for name in moved}
    if kind := config.pop("projector_type", None):
        nested["projector_type"] = kind
    write(tmp_path, values | config | {"dflash_config": nested})
    loaded = checkpoint.load(tmp_path, target)
    assert loaded.family == family
    ours = drafter.state_dict()
    assert all(torch.equal(ours[name], own) for name, own in loaded.state_dict().items())
    # Without windows the last field says nothing.
    assert loaded.shape[:-1] == drafter.shape[:-1] and not loaded.shape.windows


def test_every_causal_lm_of_transformers_is_a_draft_lm(tmp_path: Path) -> None:
    write(tmp_path, {}, {"lm_head.weight": torch.ones(1)})
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        names = (names,) if isinstance(names, str) else names
        for architectures in ([names[0]], [], None):
            config = {"model_type": model_type, "architectures": architectures}
            assert is_causal_lm(config), (model_type, architectures)
            if architectures:
                assert family_of(DraftFolder(tmp_path, config)) == "draft-lm", model_type
    assert is_causal_lm({"architectures": ["LLaMAForCausalLM"], "model_type": "llama"})
    assert is_causal_lm(
        {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own_code.OwnForCausalLM"}}
    )
    assert not is_causal_lm({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle"]})


@pytest.mark.skipif(find_spec("gptqmodel") is not None, reason="its library is here")
def test_a_draft_lm_in_gptq_names_its_library(
    target: Target, tiny_target: Find, tmp_path: Path
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(tiny_target("llama"), folder)
    values = json.loads((folder / "config.json").read_text())
    write(folder, values | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(UserError, match=r"'gptq', which needs .*gptqmodel"):
        checkpoint.load(folder, target)


BROKEN: dict[str, Any] = {
    "no json": "{",
    "a list": [],
    "an empty index": {"model.safetensors.index.json": {}},
    "an index of nothing": {"model.safetensors.index.json": {"weight_map": {}}},
    "an index of a missing shard": {"model.safetensors.index.json": {"weight_map": {"a": "b.safetensors"}}},
    "words for numbers": {"config": {"num_hidden_layers": "one", "n_predict": "3", "num_heads": [2]}},
    "null for numbers": {"config": {"hidden_size": None, "emb_dim": None, "num_attention_heads": None}},
    "zero heads": {"config": {"num_attention_heads": 0, "num_heads": 0, "n_predict": 0}},
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One draft of each kind of reader, without our record."""
    made = {}
    options = {"eagle3": Eagle3Options(), "medusa": MedusaOptions(num_heads=2), "mlp": MlpOptions()}
    for family, chosen in options.items():
        made[family] = tmp_path_factory.mktemp(family)
        FAMILIES[family].create(chosen, target, seed=0).save(made[family])
    return made


@pytest.mark.parametrize("family", ["eagle3", "medusa", "mlp"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_one_sentence(
    family: str, what: str, whole: dict[str, Path], target: Target, tmp_path: Path
) -> None:
    folder, change = tmp_path / "draft", BROKEN[what]
    shutil.copytree(whole[family], folder)
    config = json.loads((folder / "config.json").read_text())
    if isinstance(change, dict) and "config" in change:
        write(folder, config | change["config"])
    elif isinstance(change, dict):
        for name, value in change.items():
            (folder / name).write_text(json.dumps(value))
    else:
        write(folder, change)
    with pytest.raises(UserError) as caught:
        checkpoint.load(folder, target)
    said = str(caught.value)
    assert "\n" not in said and str(folder) in said and ";" in said


def test_a_pickle_of_something_else_is_refused(
    whole: dict[str, Path], target: Target, tmp_path: Path
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(whole["medusa"], folder)
    (folder / "model.safetensors").unlink()
    torch.save([torch.ones(2)], folder / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="no mapping of names to tensors"):
        checkpoint.load(folder, target)
    (folder / "medusa_lm_head.pt").write_bytes(b"\x80\x04")
    with pytest.raises(UserError, match="damaged"):
        checkpoint.load(folder, target)


class Dropper:
    """What a pickle could do to its reader."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickled_weights_run_no_code(
    whole: dict[str, Path], target: Target, tmp_path: Path
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(whole["eagle3"], folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Dropper(tmp_path / "dropped")))
    with pytest.raises(UserError, match="hold more than tensors or are damaged") as caught:
        checkpoint.load(folder, target)
    assert "\n" not in str(caught.value) and not (tmp_path / "dropped").exists()
