"""Drafts with sliding windows: exported where the engine reads them, refused where it would attend
to all of the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.command import open_source
from tests.engine_readers.proof import prove
from tests.unit.train.export.conftest import export, saved

WINDOW = 4
TAPS = {"taps": (1, 2, 3)}


@pytest.fixture
def make(target: Target, tmp_path: Path) -> Callable[..., Path]:
    return lambda family, **options: saved(
        family, target, tmp_path / family, **{"window": WINDOW} | options
    )


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
    family: str, engine: str, options: dict[str, Any], make: Callable[..., Path]
) -> None:
    draft = make(family, **options)
    out = export(draft, engine)
    config = read_json(out / "config.json")
    config = config.get("transformer_layer_config", config)
    assert config["sliding_window"] == WINDOW
    assert config["layer_types"] == ["sliding_attention"] * config["num_hidden_layers"]
    source = open_source(ExportConfig(draft=str(draft), to=engine, out="unused"))
    assert prove(source, out, engine).moved < 1e-5


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
    family: str, engine: str, options: dict[str, Any], make: Callable[..., Path]
) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino", reason="the extra [openvino] is not installed")
    if engine == "gguf":
        pytest.importorskip("gguf", reason="the extra [gguf] is not installed")
    draft = make(family, **options)
    with pytest.raises(UserError, match=f"sliding_window={WINDOW}, and .* would let it attend"):
        export(draft, engine)


def test_a_window_that_an_engine_passes_over_is_another_draft(make: Callable[..., Path]) -> None:
    draft = make("eagle3", **TAPS)
    source = open_source(ExportConfig(draft=str(draft), to="sglang", out="unused"))
    with pytest.raises(UserError, match="is not the trained one"):
        prove(source, export(draft, "vllm"), "sglang")
