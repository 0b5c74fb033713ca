"""The `speculators` layout in the library it is named after: every weight and setting of ours is
one of its model's.

The library lives in an environment of its own, whose Python DRAFTSMITH_SPECULATORS_PYTHON names
(`scripts/test --all` makes one).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import DflashOptions, DsparkOptions, Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.files import read_json
from draftsmith.train.export.command import run
from draftsmith.train.export.config import ExportConfig

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PROBE = Path(__file__).with_name("speculators_probe.py")
SHAPES = {
    "plain": Eagle3Options(taps=(1, 2, 3), draft_vocab_size=100),
    "3.1": Eagle3Options(taps=(1, 3), fc_norm=True, norm_output=True, norm_before_residual=True),
    "dflash": DflashOptions(taps=(1, 3), causal=False),
    "dspark": DsparkOptions(taps=(1, 3), causal=False),
}


@pytest.fixture
def exported(tiny_target: Callable[..., str], tmp_path: Path) -> Callable[..., Path]:
    def export(shape: str, family: str = "eagle3") -> Path:
        target = Target.load(tiny_target("llama"), dtype=torch.float32)
        counts = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(0))
        drafter = FAMILIES[family].create(SHAPES[shape], target, seed=0, token_counts=counts)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(
                    0.1
                    * torch.randn(
                        parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
                    )
                )
        checkpoint.save(drafter, tmp_path / "draft", target)
        assert (
            run(
                ExportConfig(
                    draft=str(tmp_path / "draft"), to="speculators", out=str(tmp_path / "out")
                )
            )
            == 0
        )
        return tmp_path / "out"

    return export


def read_back(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    python = os.environ.get("DRAFTSMITH_SPECULATORS_PYTHON")
    assert python, (
        "DRAFTSMITH_SPECULATORS_PYTHON is not set: run scripts/test --all, which installs "
        "speculators and sets it"
    )
    out = folder.parent / "read"
    out.mkdir(exist_ok=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, str(PROBE), str(folder), str(out)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return read_json(out / "read.json"), load_file(out / "read.safetensors")


def differing(folder: Path, read: dict[str, torch.Tensor]) -> list[str]:
    written = load_file(folder / "model.safetensors")
    return sorted(
        name
        for name, tensor in written.items()
        if name not in read or not torch.equal(read[name], tensor)
    )


@pytest.mark.parametrize("shape", ["plain", "3.1"])
def test_the_library_reads_what_was_trained(shape: str, exported: Callable[[str], Path]) -> None:
    folder = exported(shape)
    config, read = read_back(folder)
    assert config["class"] == "Eagle3DraftModel" and differing(folder, read) == []
    # The rest of its model is the target's own.
    assert all(name.startswith(("verifier_", "embed_tokens", "t2d", "d2t")) for name in read.keys() - load_file(
        folder / "model.safetensors").keys())  # fmt: skip
    options = SHAPES[shape]
    assert isinstance(options, Eagle3Options)
    assert config["eagle_aux_hidden_state_layer_ids"] == list(options.taps or ())
    for norm in ("fc_norm", "norm_output", "norm_before_residual"):
        assert config[norm] is getattr(options, norm)


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_the_library_reads_blocks(family: str, exported: Callable[..., Path]) -> None:
    folder = exported(family, family)
    config, read = read_back(folder)
    kinds = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
    assert config["class"] == kinds[family] and differing(folder, read) == []
    own = read.keys() - load_file(folder / "model.safetensors").keys()
    assert all(name.startswith(("verifier_", "embed_tokens", "lm_head")) for name in own)
    assert config["aux_hidden_state_layer_ids"] == [1, 3] and config["block_size"] == 8
    assert config["sample_from_anchor"] is (family == "dspark")


def test_a_wrong_name_would_be_noticed(exported: Callable[[str], Path]) -> None:
    folder = exported("plain")
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.hiddennorm.weight"] = tensors.pop("layers.0.hidden_norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _, read = read_back(folder)
    assert differing(folder, read) == ["layers.0.hiddennorm.weight"]
