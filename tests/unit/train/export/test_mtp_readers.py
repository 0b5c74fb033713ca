"""Readers of MTP modules: they find what was exported, and name the weight that is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from tests.engine_readers.sglang_mtp import read_mtp as read_sglang
from tests.engine_readers.vllm_mtp import read_mtp
from tests.unit.train.export.conftest import export, saved


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_sglang_reads_qwens_modules(
    kind: str, without_module: Callable[[str], Path], tmp_path: Path
) -> None:
    target = Target.load(without_module(kind), dtype=torch.float32)
    out = export(saved("mtp", target, tmp_path / "draft"), "sglang", proves=True)
    card = (out / "README.md").read_text()
    assert "--model-path draft-sglang --speculative-algorithm NEXTN --speculative-num-steps" in card
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
    out = export(saved("mtp", target, tmp_path / "draft"), "vllm")
    tensors = load_file(out / "model-mtp.safetensors")
    del tensors[name]
    save_file(tensors, out / "model-mtp.safetensors")
    config = json.loads((out / "config.json").read_text())
    with pytest.raises(UserError, match=f"finds no weight for its parameter {name!r}"):
        read_mtp(out, config)
