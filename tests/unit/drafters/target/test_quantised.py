"""Quantised targets: what a new draft takes from them are numbers, never codes; a library that is
missing is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import OPTIONS, DraftLmOptions, Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target import quantised
from draftsmith.drafters.target.load import load_model
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from tests.conftest import merge_json

DRAFTS = {family: OPTIONS[family]() for family in ("eagle3", "p-eagle", "dflash", "dspark")}
DRAFTS["draft-lm"] = DraftLmOptions(target_layers=(0, 3))


class CodedLinear(nn.Module):
    """A stand-in for any library's: codes of a byte, and a scale for each output."""

    def __init__(self, plain: nn.Linear, dtype: torch.dtype):
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        largest = 127.0 if dtype is torch.int8 else 448.0
        scale = plain.weight.detach().abs().amax(dim=1, keepdim=True) / largest
        codes = plain.weight.detach() / scale
        codes = codes.round() if dtype is torch.int8 else codes
        self.weight = nn.Parameter(codes.to(dtype), requires_grad=False)
        self.register_buffer("scale", scale)

    @property
    def numbers(self) -> torch.Tensor:
        return self.weight.float() * self.scale

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.numbers.T

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a library may repack its codes for a state dict")


def coded_and_plain(folder: str, dtype: torch.dtype) -> tuple[Target, Target]:
    """A target with coded projections and head, and the same with their numbers."""
    coded = load_model(folder, trust_remote_code=False, dtype=torch.float32)
    plain = load_model(folder, trust_remote_code=False, dtype=torch.float32)
    for name, module in list(coded.named_modules()):
        if isinstance(module, nn.Linear):
            own = CodedLinear(module, dtype)
            coded.set_submodule(name, own)
            plain.get_submodule(name).weight.data.copy_(own.numbers)
    coded.config.quantization_config = {"quant_method": "stand-in"}
    return Target(coded, folder), Target(plain, folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_new_draft_takes_numbers_from_a_quantised_target(tiny_target, dtype):
    coded, plain = coded_and_plain(tiny_target("llama"), dtype)
    torch.testing.assert_close(coded.output_weight, plain.output_weight, atol=1e-6, rtol=1e-6)
    for family, options in DRAFTS.items():
        found, wanted = (
            FAMILIES[family].create(options, one, seed=0).state_dict() for one in (coded, plain)
        )
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


def test_a_draft_cut_out_of_a_quantised_target_is_saved_as_a_plain_one(tiny_target, tmp_path):
    coded, plain = coded_and_plain(tiny_target("llama"), torch.int8)
    DraftLm.create(DraftLmOptions(target_layers=(0, 3)), coded, seed=0).save(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.isfinite(DraftLm.load(tmp_path, plain).head_weight()).all()


class Unreadable(CodedLinear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if states.ndim == 2:
            raise RuntimeError("no kernel runs here")
        return super().forward(states)


def test_weights_that_cannot_be_read_are_left_alone(tiny_target, caplog):
    folder = tiny_target("llama")
    model = load_model(folder, trust_remote_code=False, dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp.up_proj = Unreadable(layer.mlp.up_proj, torch.int8)
    model.config.quantization_config = {"quant_method": "stand-in"}
    target = Target(model, folder)
    drafter = Eagle3.create(Eagle3Options(), target, seed=0)
    assert drafter.midlayer.mlp.up_proj.weight.abs().max() < 1
    assert "weights of a Unreadable cannot be read (no kernel runs here)" in caplog.text
    with pytest.raises(UserError, match=r"target_layers.*up_proj.*cannot be read"):
        DraftLm.create(DraftLmOptions(target_layers=(0,)), target, seed=0)


def with_settings(folder: str, copy: Path, settings: dict[str, Any]) -> Path:
    shutil.copytree(folder, copy)
    merge_json(copy / "config.json", {"quantization_config": settings})
    return copy


@pytest.mark.parametrize(
    ("method", "libraries"),
    [
        ("gptq", "optimum and gptqmodel"), ("awq", "gptqmodel"), ("bitsandbytes", "bitsandbytes"),
        ("torchao", "torchao"), ("compressed-tensors", "compressed-tensors"), ("hqq", "hqq"),
    ],
)  # fmt: skip
def test_a_missing_library_is_named(tiny_target, tmp_path, monkeypatch, method, libraries):
    monkeypatch.setattr(quantised, "_is_there", lambda module: False)
    folder = with_settings(
        tiny_target("llama"), tmp_path / "quantised", {"quant_method": method, "bits": 4}
    )
    with pytest.raises(UserError, match=f"quantised by '{method}', which needs {libraries};") as at:
        Target.load(folder)
    assert "\n" not in str(at.value)


def test_int8_with_outliers_depends_on_the_batch(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr(quantised, "_is_there", lambda module: True)
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    folder = with_settings(tiny_target("llama"), tmp_path / "int8", settings)
    with pytest.raises(UserError, match=r"LLM.int8\(\) with outliers above 6.0"):
        Target.load(folder)
