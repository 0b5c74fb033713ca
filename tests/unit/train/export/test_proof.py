"""Every export is read back as its engine reads it and drafts the same rounds; one that is not the
trained draft is refused."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
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
from draftsmith.train.export.source import ExportSource
from draftsmith.train.export.table import WRITERS
from tests.engine_readers import proof
from tests.engine_readers.table import READERS

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
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in drafter.parameters():
                    scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
                    parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
            checkpoint.save(drafter, made[shape], target)
        return made[shape]

    def export(family: str, engine: str) -> tuple[Path, Path]:
        if engine == "gguf":
            pytest.importorskip("gguf", reason="the extra [gguf] is not installed")
        if engine == "openvino":
            pytest.importorskip("openvino_genai", reason="the extra [openvino] is not installed")
        shape = IN_SPECULATORS.get(family, family) if engine == "speculators" else family
        trained = draft(family, shape)
        out = trained.with_name(engine)
        if not out.exists():
            run(ExportConfig(draft=str(trained), to=engine, out=str(out)))
        return trained, out

    return export


@pytest.fixture(autouse=True, scope="module")
def read_and_played_once() -> Iterator[None]:
    """No target and no draft changes once it is written: only exports differ from test to test."""
    play, made = proof.play_checkpoint, dict[Path, list[proof.Play]]()

    def play_once(source: ExportSource, target: Target) -> list[proof.Play]:
        if source.draft not in made:
            made[source.draft] = play(source, target)
        return made[source.draft]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "play_checkpoint", play_once)
        patch.setattr(proof, "load_target", functools.cache(proof.load_target))
        yield


def proved(draft: Path, folder: Path, engine: str) -> Any:
    return proof.prove(
        open_source(ExportConfig(draft=str(draft), to=engine, out="unused")), folder, engine
    )


def test_every_layout_that_is_written_has_a_reader() -> None:
    assert {
        (family, engine) for family, writers in WRITERS.items() for engine in writers
    } == READERS.keys()


# In a repository for Triton lies vLLM's layout: one draft beside its target and one within it are
# enough.
PAIRS = [
    (family, engine)
    for family, engine in sorted(READERS)
    if engine != "triton" or family in ("eagle3", "mtp")
    # Of a target's own block alone: test_own_block_layouts.py.
    if (family, engine) not in (("mtp", "sglang"), ("mtp", "speculators"))
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "engine"), PAIRS)
def test_engines_read_the_draft_that_was_trained(
    family: str, engine: str, exported: Callable[[str, str], tuple[Path, Path]]
) -> None:
    found = proved(*exported(family, engine), engine)
    assert found.rounds > 20 and found.moved < 1e-5


def test_both_draft_behind_the_tokens_of_the_target(
    exported: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """transformers makes Qwen2's tokenizer of any target's files in a folder of its model type."""
    draft, folder = exported("mtp", "vllm")
    shutil.copytree(folder, tmp_path / "e")
    tokenizer = read_json(tmp_path / "e" / "tokenizer.json")
    vocab = tokenizer["model"]["vocab"]
    vocab["e"], vocab["t"] = vocab["t"], vocab["e"]
    write_json(tmp_path / "e" / "tokenizer.json", tokenizer)
    assert proved(draft, tmp_path / "e", "vllm") == proved(draft, folder, "vllm")


def weights_of(folder: Path) -> Path:
    """The one file of the draft's own tensors."""
    names = ("model-mtp.safetensors", "medusa_lm_head.safetensors", "model.safetensors")
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
    index = to / "model.safetensors.index.json"
    if index.is_file():
        known = read_json(index)
        kept = {
            name: file for name, file in known["weight_map"].items() if file != weights_of(to).name
        }
        write_json(
            index, known | {"weight_map": kept | dict.fromkeys(tensors, weights_of(to).name)}
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


def nested(layers: list[int]) -> dict[str, Any]:
    return {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers}


def reversed_map(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    ids = torch.arange(len(tensors["d2t"]))
    tensors["d2t"] = (tensors["d2t"] + ids).flip(0) - ids


WRONG: list[tuple[str, str, Change]] = [
    # Names and orders.
    ("eagle3", "vllm", exchange("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight")),
    (
        "eagle3",
        "vllm",
        exchange("midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight"),
    ),
    ("eagle3", "vllm", rename("norm.weight", "final_norm.weight")),
    ("eagle3", "sglang", rename("norm.weight", "final_norm.weight")),
    ("eagle3", "speculators", halves("layers.0.self_attn.q_proj.weight")),
    ("eagle3", "speculators", put(norm_before_residual=True)),
    ("eagle3", "vllm", put(norm_output=True)),
    ("eagle3", "sglang", put(norm_output=True)),
    (
        "p-eagle",
        "vllm",
        lambda config, tensors: tensors.update(mask_hidden=tensors["mask_hidden"].flip(1)),
    ),
    ("p-eagle", "vllm", lambda config, tensors: tensors.pop("mask_hidden")),
    ("p-eagle", "speculators", put(mask_token_id=7)),
    ("eagle1", "vllm", halves("fc.weight")),
    ("eagle1", "sglang", rename("fc.weight", "model.projection.weight")),
    ("mtp", "vllm", halves("model.mtp_layers.0.input_proj.weight")),
    (
        "mtp",
        "vllm",
        exchange(
            "model.mtp_layers.0.token_layernorm.weight",
            "model.mtp_layers.0.hidden_layernorm.weight",
        ),
    ),
    ("medusa", "vllm", exchange("blocks.0.layers.0.weight", "blocks.1.layers.0.weight")),
    ("mlp", "hf", exchange("speculator.proj.0.weight", "speculator.proj.1.weight")),
    ("dspark", "vllm", exchange("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")),
    ("dspark", "sglang", rename("hidden_norm.weight", "encoder_norm.weight")),
    (
        "draft-lm",
        "hf",
        exchange("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ),
    # Transpositions; all of these matrices are square here.
    ("eagle3", "sglang", transpose("midlayer.self_attn.o_proj.weight")),
    ("eagle1", "vllm", transpose("layers.0.self_attn.q_proj.weight")),
    ("medusa", "hf", transpose("2.0.linear.weight")),
    ("mlp", "hf", transpose("speculator.proj.0.weight")),
    ("dflash", "vllm", transpose("layers.0.self_attn.o_proj.weight")),
    ("dflash", "sglang", transpose("layers.1.self_attn.q_proj.weight")),
    ("draft-lm", "vllm", transpose("model.layers.1.self_attn.q_proj.weight")),
    # Layer ids and vocabulary maps.
    ("eagle3", "vllm", put(eagle_aux_hidden_state_layer_ids=[0, 1, 2])),
    ("eagle3", "sglang", put(eagle_config=nested([1, 2, 3]))),
    ("eagle3", "sglang", put(eagle_config=nested([0, 1, 1]))),
    ("eagle3", "vllm", reversed_map),
    ("eagle3", "sglang", reversed_map),
    ("eagle3", "vllm", lambda config, tensors: tensors.pop("d2t")),
    ("eagle3", "vllm", lambda config, tensors: config.pop("eagle_aux_hidden_state_layer_ids")),
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
    with pytest.raises(UserError) as caught:
        proved(draft, wrong, engine)
    assert "\n" not in str(caught.value)


def test_a_stitched_target_must_still_be_the_target(
    exported: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    draft, out = exported("mtp", "vllm")
    shutil.copytree(out, tmp_path / "wrong")
    tensors = load_file(tmp_path / "wrong" / "model-target.safetensors")
    name = "model.layers.2.self_attn.o_proj.weight"
    save_file(
        {**tensors, name: tensors[name].T.contiguous()},
        tmp_path / "wrong" / "model-target.safetensors",
    )
    with pytest.raises(UserError, match=r"is not the trained one|are accepted where"):
        proved(draft, tmp_path / "wrong", "vllm")


def test_a_causal_block_is_refused_in_the_speculators_layout(
    exported: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    draft, _ = exported("dflash", "vllm")
    with pytest.raises(UserError, match=r"train it with draft\.causal=false"):
        run(ExportConfig(draft=str(draft), to="speculators", out=str(tmp_path / "out")))
