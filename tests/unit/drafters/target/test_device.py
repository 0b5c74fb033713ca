"""Without a type, weights have the checkpoint's own wherever the processor is fast at it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.drafters.target import device
from draftsmith.drafters.target.device import fast_at_bf16, load_target, weight_dtype
from draftsmith.errors import UserError
from draftsmith.kernels.measured import VARIABLE, Choices
from draftsmith.kernels.products.fast_types import Use
from tests.conftest import merge_json

CPU = torch.device("cpu")
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def folder_in(tiny_target: Callable[..., str], tmp_path: Path) -> Callable[..., Path]:
    """A tiny target whose config.json says more."""

    def make(arch: str = "llama", **changes: Any) -> Path:
        folder = tmp_path / f"{arch}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_target(arch), folder)
        merge_json(folder / "config.json", changes)
        return folder

    return make


def found(folder: Path, choices: Choices, use: Use = "laid out") -> torch.dtype | str:
    return weight_dtype("auto", CPU, folder, use=use, trust_remote_code=False, choices=choices)


def times(tmp_path: Path, **seconds: float) -> Choices:
    """Choices by made-up seconds of each type; others must not be asked for."""
    return Choices(tmp_path, lambda name, way: seconds[name])


@pytest.mark.parametrize("seconds, expected", [(1.0, BFLOAT16), (3.0, FLOAT32)])
@pytest.mark.parametrize("use", ["laid out", "plain", "step"])
def test_the_checkpoints_own_type_where_it_is_faster(
    tmp_path: Path, folder_in: Callable[..., Path], seconds: float, expected: torch.dtype, use: Use
) -> None:
    choices = times(tmp_path, float32=1.5, bfloat16=seconds)
    folder = folder_in(dtype="bfloat16")
    assert found(folder, choices, use) == found(folder, choices, use) == expected


@pytest.mark.parametrize(
    "use, seconds, line",
    [
        (
            "plain",
            0.5,
            "dtype bfloat16: the checkpoint's, 14.0 times as fast as float32 here (products "
            "of torch)",
        ),
        (
            "plain",
            50.0,
            "dtype float32: the checkpoint's bfloat16 has 0.14 of its speed here (products "
            "of torch)",
        ),
        (
            "step",
            50.0,
            "dtype float32: the checkpoint's bfloat16 has 0.14 of its speed here (products "
            "of training)",
        ),
    ],
)
def test_the_choice_is_told_once(
    tmp_path: Path,
    folder_in: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    use: Use,
    seconds: float,
    line: str,
) -> None:
    choices, folder = times(tmp_path, float32=7.0, bfloat16=seconds), folder_in(dtype="bfloat16")
    capsys.readouterr()
    for _ in range(2):
        found(folder, choices, use)
    assert capsys.readouterr().err == f"draftsmith: {line}\n"


@pytest.mark.parametrize("own", ["float32", "float64"])
def test_float32_needs_no_timing(tmp_path: Path, folder_in: Callable[..., Path], own: str) -> None:
    assert found(folder_in(dtype=own), times(tmp_path)) == FLOAT32
    assert found(tmp_path / "nowhere", times(tmp_path)) == FLOAT32  # loading says what is missing


def test_float16_is_timed_and_never_rounded_unasked(
    tmp_path: Path, folder_in: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_in(dtype="float16")
    capsys.readouterr()
    slow = times(tmp_path, float32=1.0, float16=4.0, bfloat16=0.25)
    assert found(folder, slow) == FLOAT32
    assert capsys.readouterr().err == (
        "draftsmith: dtype float32: the checkpoint's float16 has 0.25 of its speed here (products "
        "of a server); --dtype bfloat16 rounds the weights, 4.0 times as fast\n"
    )
    (tmp_path / "other").mkdir()
    fast = times(tmp_path / "other", float32=1.0, float16=0.5)
    assert found(folder, fast) == FLOAT16


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt2", "qwen3_next"])
def test_models_that_are_not_laid_out_are_timed_by_torchs_products(
    tmp_path: Path, folder_in: Callable[..., Path], arch: str
) -> None:
    choices = times(tmp_path, float32=1.0, bfloat16=2.0)
    assert found(folder_in(arch, dtype="bfloat16"), choices) == FLOAT32
    assert [one.kind for one in choices.known()] == ["type of plain products"]


def test_a_type_that_is_given_is_taken(tmp_path: Path, folder_in: Callable[..., Path]) -> None:
    folder = folder_in(dtype="bfloat16")
    for name, dtype in (("float32", FLOAT32), ("float16", FLOAT16)):
        options = {"trust_remote_code": False, "choices": times(tmp_path)}
        assert weight_dtype(name, CPU, folder, **options) == dtype
    assert weight_dtype("auto", torch.device("cuda"), folder, **options) == "auto"
    with pytest.raises(UserError, match="dtype is 'int8'; it must be one of auto, float32"):
        weight_dtype("int8", CPU, folder, **options)


def test_a_target_has_the_type_that_this_processor_is_fast_at(
    folder_in: Callable[..., Path],
) -> None:
    folder = str(folder_in(dtype="bfloat16"))
    expected = weight_dtype("auto", CPU, folder, trust_remote_code=False)
    assert load_target(folder, device="cpu", trust_remote_code=False).dtype == expected


@pytest.mark.parametrize("seconds, expected", [(1.0, True), (3.0, False)])
def test_bfloat16_steps_pay_where_they_are_faster(
    tmp_path: Path, seconds: float, expected: bool
) -> None:
    choices = times(tmp_path, float32=2.0, bfloat16=seconds)
    assert fast_at_bf16(CPU, choices) is expected
    assert not fast_at_bf16(torch.device("mps")) and not fast_at_bf16(torch.device("xpu"))


def test_a_target_that_loads_long_is_seen_to_load(
    tiny_target: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("draftsmith.progress.SILENT_S", 0.5)
    monkeypatch.setattr(device, "check_weights", lambda *_: time.sleep(2))
    load_target(name := tiny_target("llama"), dtype=FLOAT32, device="cpu", trust_remote_code=False)
    first, *others, last = capsys.readouterr().err.splitlines()
    assert first == f"draftsmith: loading {name}" and f"loading {name}: 1/1" in last
    assert others and all(one.startswith(f"loading {name}: 0/1") for one in others)
