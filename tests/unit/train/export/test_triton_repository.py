"""The model repository for NVIDIA Triton's vLLM backend: its folders, the model configuration,
vLLM's arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.command import open_source
from draftsmith.train.export.serving import model_name
from tests.engine_readers.table import draft_folder
from tests.unit.train.export.conftest import export, saved


@pytest.fixture
def make(target: Target, tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: export(
        saved(family, target, tmp_path / "draft"), "triton", speculative_tokens=4
    )


def test_the_repository_is_a_model_of_one_version(
    make: Callable[[str], Path], tiny_target: Callable[..., str]
) -> None:
    out = make("eagle3")
    name = Path(tiny_target("llama")).name
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == [name]
    assert sorted(path.name for path in (out / name).iterdir()) == ["1", "config.pbtxt"]
    lines = (out / name / "config.pbtxt").read_text().splitlines()
    assert [line.strip() for line in lines if not line.startswith("#")] == [
        f'name: "{name}"',
        'backend: "vllm"',
        "max_batch_size: 0",
        *("model_transaction_policy {", "decoupled: true", "}"),
        *("instance_group [", "{", "count: 1", "kind: KIND_MODEL", "}", "]"),
    ]
    draft = (out / name / "1" / "draft").resolve()
    assert read_json(out / name / "1" / "model.json") == {
        "model": str(Path(tiny_target("llama")).resolve()),
        "speculative_config": {
            "method": "eagle3",
            "num_speculative_tokens": 4,
            "draft_sample_method": "probabilistic",
            "model": str(draft),
        },
    }
    assert read_json(draft / "config.json")["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "tritonserver --model-repository" in (out / "README.md").read_text()


def test_a_stitched_module_is_the_model_itself(make: Callable[[str], Path]) -> None:
    out = make("mtp")
    arguments = read_json(next(out.glob("*/1/model.json")))
    assert arguments["speculative_config"] == {
        "method": "mtp",
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert Path(arguments["model"]) == draft_folder(out).resolve()
    assert read_json(draft_folder(out) / "config.json")["architectures"] == ["MiMoForCausalLM"]


def test_names_and_refusals(make: Callable[[str], Path], tmp_path: Path) -> None:
    assert model_name("Qwen/Qwen3-8B") == "Qwen3-8B" and model_name("/data/my model/") == "my-model"
    make("eagle3")
    with pytest.raises(UserError, match="names folders of this machine"):
        export(tmp_path / "draft", "triton", push="ann/pair")
    config = ExportConfig(draft=str(tmp_path / "draft"), to="triton", out=str(tmp_path / "models"))
    assert open_source(config).out == tmp_path / "models"
