"""Readers of MTP modules: they find what was exported, and name the weight that is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.mtp import Mtp
from draftsmith.drafters.options import MtpOptions
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.command import run
from tests.engine_readers.proof import export_and_prove
from tests.engine_readers.sglang_mtp import read_mtp as read_sglang
from tests.engine_readers.vllm_mtp import read_mtp
from tests.noise import noisy


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_sglang_reads_qwens_modules(
    kind: str, without_module: Callable[[str], Path], tmp_path: Path
) -> None:
    target = Target.load(without_module(kind), dtype=torch.float32)
    drafter = Mtp.create(MtpOptions(), target, seed=3)
    noisy(drafter, 0, 0.1)
    checkpoint.save(drafter, tmp_path / "draft", target)
    out = tmp_path / "out"
    export_and_prove(ExportConfig(draft=str(tmp_path / "draft"), to="sglang", out=str(out)))
    card = (out / "README.md").read_text()
    assert "--model-path out --speculative-algorithm NEXTN --speculative-num-steps" in card
    tensors = load_file(out / "model-mtp.safetensors")
    del tensors["mtp.norm.weight"]
    save_file(tensors, out / "model-mtp.safetensors")
    with pytest.raises(UserError, match=r"SGLang finds no weight for its parameter 'mtp\.norm"):
        read_sglang(out, {})


@pytest.mark.parametrize(
    ("kind", "name"),
    [("qwen3_next", "mtp.layers.0.mlp.experts.1.up_proj.weight"), ("qwen3_5", "mtp.fc.weight"),
     ("ernie4_5_moe", "model.mtp_emb_norm.0.weight")],
)  # fmt: skip
def test_vllm_would_refuse_a_weight_that_is_missing(
    kind: str, name: str, without_module: Callable[[str], Path], tmp_path: Path
) -> None:
    target = Target.load(without_module(kind))
    checkpoint.save(Mtp.create(MtpOptions(), target, seed=0), tmp_path / "draft", target)
    out = tmp_path / "out"
    run(ExportConfig(draft=str(tmp_path / "draft"), to="vllm", out=str(out)))
    tensors = load_file(out / "model-mtp.safetensors")
    del tensors[name]
    save_file(tensors, out / "model-mtp.safetensors")
    config = json.loads((out / "config.json").read_text())
    with pytest.raises(UserError, match=f"finds no weight for its parameter {name!r}"):
        read_mtp(out, config)
