"""Every export, read back as its engine reads it, says what the trained draft says; one that is
another draft is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import (
    OPTIONS,
    DflashOptions,
    DraftLmOptions,
    DsparkOptions,
    Eagle3Options,
)
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.command import open_source, run
from draftsmith.train.export.table import WRITERS
from tests.engine_readers.proof import prove
from tests.engine_readers.table import READERS
from tests.noise import noisy

SHAPES = {
    "eagle3": Eagle3Options(draft_vocab_size=200, taps=(1, 2, 3)),
    "draft-lm": DraftLmOptions(target_layers=(0, 3)),
    "block": DflashOptions(causal=False),
    "transitions": DsparkOptions(causal=False),
}
# The layout has blocks whose slots see each other only.
IN_SPECULATORS = {"dflash": "block", "dspark": "transitions"}
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def exported(
    target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, Path]]:
    """`exported(family, engine)` -> (draft, export), made once. Noise in all its weights makes no
    two alike."""
    made: dict[str, Path] = {}

    def draft(family: str, shape: str) -> Path:
        if shape not in made:
            made[shape] = tmp_path_factory.mktemp(shape) / "draft"
            counts = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(5))
            drafter = FAMILIES[family].create(
                SHAPES.get(shape, OPTIONS[family]()), target, seed=0, token_counts=counts
            )
            checkpoint.save(noisy(drafter, 1), made[shape], target)
        return made[shape]

    def export(family: str, engine: str) -> tuple[Path, Path]:
        if engine == "gguf":
            pytest.importorskip("gguf", reason="the extra [gguf] is not installed")
        shape = IN_SPECULATORS.get(family, family) if engine == "speculators" else family
        trained = draft(family, shape)
        out = trained.with_name(engine)
        if not out.exists():
            run(ExportConfig(draft=str(trained), to=engine, out=str(out)))
        return trained, out

    return export


def proved(draft: Path, folder: Path, engine: str) -> float:
    source = open_source(ExportConfig(draft=str(draft), to=engine, out="unused"))
    return prove(source, folder, engine)


# tests/e2e/test_openvino_genai.py, test_speculators.py and test_vllm_cpu.py run these in the engine or
# library itself; MTP modules have the names of published ones, which heads/test_shipped_mtp.py and
# test_appended_mtp.py read.
READ_BY_ITSELF = {
    ("draft-lm", "openvino"),
    ("eagle3", "openvino"),
    ("eagle1", "speculators"),
    ("mtp", "speculators"),
    ("mtp", "sglang"),
    *((family, "vllm") for family in ("eagle3", "p-eagle", "eagle1", "medusa", "mtp")),
    ("eagle3", "speculators"),
    ("p-eagle", "speculators"),
}


def test_every_layout_that_is_written_has_a_reader() -> None:
    written = {(family, engine) for family, writers in WRITERS.items() for engine in writers}
    assert written - READ_BY_ITSELF == READERS.keys()


@pytest.mark.long
@pytest.mark.parametrize(("family", "engine"), sorted(READERS))
def test_engines_read_the_draft_that_was_trained(
    family: str, engine: str, exported: Callable[[str, str], tuple[Path, Path]]
) -> None:
    assert proved(*exported(family, engine), engine) < 1e-5


def weights_of(folder: Path) -> Path:
    """The one file of the draft's own tensors."""
    names = ("medusa_lm_head.safetensors", "model.safetensors")
    return next(folder / name for name in names if (folder / name).is_file())


def corrupted(folder: Path, to: Path, change: Change) -> Path:
    shutil.copytree(folder, to)
    config, tensors = read_json(to / "config.json"), load_file(weights_of(to))
    change(config, tensors)
    write_json(to / "config.json", config)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        weights_of(to),
        metadata={"format": "pt"},
    )
    return to


def exchange(one: str, other: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def transpose(name: str) -> Change:
    return lambda config, tensors: tensors.update({name: tensors[name].T})


def rename(old: str, new: str) -> Change:
    return lambda config, tensors: tensors.update({new: tensors.pop(old)})


def halves(name: str) -> Change:
    """The two inputs of a projection in the other order."""
    return lambda config, tensors: tensors.update(
        {name: torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)}
    )


def put(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


def reversed_map(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    ids = torch.arange(len(tensors["d2t"]))
    tensors["d2t"] = (tensors["d2t"] + ids).flip(0) - ids


# One of each sort: names and orders, options, transpositions, layer ids, vocabulary maps.
WRONG: list[tuple[str, str, Change]] = [
    (
        "eagle3",
        "sglang",
        exchange("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"),
    ),
    ("eagle3", "sglang", rename("norm.weight", "final_norm.weight")),
    ("dspark", "speculators", put(mask_token_id=7)),
    ("eagle1", "sglang", halves("fc.weight")),
    ("medusa", "hf", transpose("2.0.linear.weight")),
    ("eagle3", "sglang", reversed_map),
    ("eagle3", "sglang", put(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})),
    (
        "dflash",
        "sglang",
        lambda config, tensors: config["dflash_config"].update(target_layer_ids=[1, 2]),
    ),
]


@pytest.mark.parametrize(("family", "engine", "change"), WRONG)
def test_an_export_that_is_another_draft_is_refused(
    family: str,
    engine: str,
    change: Change,
    exported: Callable[[str, str], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    draft, out = exported(family, engine)
    wrong = corrupted(out, tmp_path / "wrong", change)
    with pytest.raises((UserError, AssertionError)):
        proved(draft, wrong, engine)


def test_a_causal_block_is_refused_in_the_speculators_layout(
    exported: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    draft, _ = exported("dflash", "vllm")
    with pytest.raises(UserError, match=r"train it with draft\.causal=false"):
        run(ExportConfig(draft=str(draft), to="speculators", out=str(tmp_path / "out")))
