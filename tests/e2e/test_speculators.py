"""The `speculators` layout in the library it is named after: every weight and setting of ours is
one of its model's, and what it computes of EAGLE-1 and MTP modules is what we compute.

The library lives in an environment of its own, whose Python DRAFTSMITH_SPECULATORS_PYTHON names
(`scripts/test --all` makes one). Beside it lies `eagle`, a release that still has EAGLE-1, with the
transformers of its time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.draft_shape import llama_config, shape_of
from draftsmith.drafters.heads.eagle1 import Eagle1
from draftsmith.drafters.heads.mtp import Mtp
from draftsmith.drafters.heads.mtp_deepseek import AppendedMtp
from draftsmith.drafters.heads.mtp_layouts import SPECULATORS
from draftsmith.drafters.interface import TrainedDrafter, UnrollBatch
from draftsmith.drafters.options import DflashOptions, DsparkOptions, Eagle3Options, MtpOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.files import read_json
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.command import run
from tests.e2e.workshop import python_of, run_python
from tests.noise import noisy

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PROBE = Path(__file__).with_name("speculators_probe.py")
LOGITS_PROBE = Path(__file__).with_name("speculators_logits_probe.py")
IDS = torch.randint(3, 288, (1, 16), generator=torch.Generator().manual_seed(2))
SHAPES = {
    "plain": Eagle3Options(taps=(1, 2, 3), draft_vocab_size=100),
    "3.1": Eagle3Options(taps=(1, 3), fc_norm=True, norm_output=True, norm_before_residual=True),
    "dflash": DflashOptions(taps=(1, 3), causal=False),
    "dspark": DsparkOptions(taps=(1, 3), causal=False),
}


def noised(drafter: TrainedDrafter, target: Target, folder: Path) -> Path:
    """An export of the draft, with weights that no default gives."""
    checkpoint.save(noisy(drafter, 1, 0.1), folder / "draft", target)
    run(ExportConfig(draft=str(folder / "draft"), to="speculators", out=str(folder / "out")))
    return folder / "out"


@pytest.fixture
def exported(tiny_target: Callable[..., str], tmp_path: Path) -> Callable[..., Path]:
    def export(shape: str, family: str = "eagle3") -> Path:
        target = Target.load(tiny_target("llama"), dtype=torch.float32)
        counts = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(0))
        drafter = FAMILIES[family].create(SHAPES[shape], target, seed=0, token_counts=counts)
        return noised(drafter, target, tmp_path)

    return export


def run_library(*arguments: str, release: str = "") -> None:
    """`release`: a folder beside the environment's `bin` that comes first on the path."""
    python = python_of("DRAFTSMITH_SPECULATORS_PYTHON")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(Path(python).parents[1] / release) if release else ""
    run_python([python, *arguments], env=environment)


def read_back(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    out = folder.parent / "read"
    out.mkdir(exist_ok=True)
    run_library(str(PROBE), str(folder), str(out))
    return read_json(out / "read.json"), load_file(out / "read.safetensors")


def differing(folder: Path, read: dict[str, torch.Tensor]) -> list[str]:
    written = load_file(folder / "model.safetensors")
    same = [name for name in written if name in read and torch.equal(read[name], written[name])]
    return sorted(written.keys() - same)


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


@torch.no_grad()
def first_logits(drafter: TrainedDrafter, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Our logits [T, V] of the first drafted token behind each position of a text, and the states
    [1, T, H] that they are computed from."""
    mask = torch.ones_like(IDS)
    states = target.states(IDS, mask, ())[1]
    batch = UnrollBatch(input_ids=IDS, attention_mask=mask, taps=states, num_steps=1)
    (step,) = drafter.unroll(batch)
    return (step.hidden @ drafter.head_weight().T)[0], states


def library_logits(
    folder: Path, target: Target, ids: torch.Tensor, states: torch.Tensor, *, release: str = ""
) -> torch.Tensor:
    given, out = folder.parent / "given.safetensors", folder.parent / "logits.safetensors"
    save_file({"ids": ids.contiguous(), "states": states.contiguous()}, given)
    paths = (str(LOGITS_PROBE), str(folder), target.name, str(given), str(out))
    run_library(*paths, release=release)
    found = load_file(out)["logits"]
    return found[0] if found.ndim == 3 else found


@pytest.mark.parametrize(("bias", "layernorms"), [(False, False), (True, False), (True, True)])
def test_the_library_computes_the_same_of_eagle1(
    bias: bool, layernorms: bool, tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    target = Target.load(tiny_target("llama"), dtype=torch.float32)
    config = llama_config(shape_of(target))
    drafter = Eagle1(config, target, bias=bias, layernorms=layernorms)
    folder = noised(drafter, target, tmp_path)
    ours, states = first_logits(drafter, target)
    # The library is given the tokens that stand at the states' positions, one further on.
    following = torch.roll(IDS, -1, dims=1)
    theirs = library_logits(folder, target, following, states, release="eagle")
    torch.testing.assert_close(theirs[:-1], ours[:-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_the_library_computes_the_same_of_mtp_modules(
    kind: str, tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    target = Target.load(tiny_target(kind), dtype=torch.float32)
    new = AppendedMtp(target, SPECULATORS) if kind == "qwen3" else None
    drafter = new or Mtp.create(MtpOptions(), target, seed=0)
    folder = noised(drafter, target, tmp_path)
    config, read = read_back(folder)
    assert config["class"] == "MTPDraftModel" and differing(folder, read) == []
    own = read.keys() - load_file(folder / "model.safetensors").keys()
    assert own == {"embed_tokens.weight", "lm_head.weight"}
    ours, states = first_logits(drafter, target)
    theirs = library_logits(folder, target, IDS, states)
    assert len(theirs) == IDS.shape[1] - 4  # three steps ahead
    torch.testing.assert_close(theirs, ours[: len(theirs)], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_the_library_puts_an_mtp_module_into_its_target(
    kind: str, tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    """As `export --to vllm` does."""
    target = Target.load(tiny_target(kind), dtype=torch.float32)
    folder = noised(Mtp.create(MtpOptions(), target, seed=0), target, tmp_path)
    stitched, whole = tmp_path / "stitched", tmp_path / "whole"
    command = ("-m", "speculators", "stitch-mtp", str(folder), target.name)
    run_library(*command, "--output-path", str(stitched))
    run(ExportConfig(draft=str(tmp_path / "draft"), to="vllm", out=str(whole)))
    theirs = load_file(stitched / "model.safetensors")
    ours = load_file(whole / "model-mtp.safetensors")
    assert {name for name in theirs if name.startswith("mtp.")} == ours.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
