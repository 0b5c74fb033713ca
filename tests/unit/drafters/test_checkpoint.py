"""Draft checkpoints: what is saved is what is loaded, and every damaged or foreign folder is one
sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import safe_files, weight_files
from draftsmith.errors import UserError
from tests.small_drafts import small_draft

KINDS = (
    "eagle3 subset", "p-eagle subset", "mtp", "draft-lm", "eagle1", "medusa", "mlp",
    "dflash, seeing all", "dspark",
)  # fmt: skip


def save(kind: str, target: Target, folder: Path) -> tuple[TrainedDrafter, Path]:
    drafter = small_draft(kind, target)
    checkpoint.save(drafter, folder, target, training={"steps": 3}, evaluation={"tau": 2.0})
    return drafter, folder


@pytest.fixture(params=KINDS)
def saved(request, target, tmp_path):
    return save(request.param, target, tmp_path / "draft")


@pytest.fixture
def folder(target, tmp_path):
    """What no family has a part in."""
    return save("eagle3", target, tmp_path / "draft")[1]


def test_round_trip(saved, target):
    drafter, folder = saved
    loaded = checkpoint.load(folder, target)
    assert loaded.family == drafter.family and loaded.taps == drafter.taps
    own, theirs = drafter.state_dict(), loaded.state_dict()
    assert own.keys() == theirs.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor, theirs[name]), name
    if drafter.vocab_map is not None:
        assert torch.equal(loaded.vocab_map, drafter.vocab_map)


def test_record(saved, target):
    drafter, folder = saved
    record = checkpoint.read_metadata(folder)
    assert record["family"] == drafter.family
    assert record["training"] == {"steps": 3} and record["evaluation"] == {"tau": 2.0}
    assert (
        record["target"]["vocab_size"] == target.vocab_size
        and record["target"]["revision"] == target.revision
    )
    checkpoint.store_evaluation(folder, {"tau": 2.5})
    assert checkpoint.read_metadata(folder) == {**record, "evaluation": {"tau": 2.5}}


def test_loading_casts_to_the_targets_dtype(saved, tiny_target):
    half = Target.load(tiny_target("llama"), dtype=torch.bfloat16)
    _, folder = saved
    assert {p.dtype for p in checkpoint.load(folder, half).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in checkpoint.load(folder, half, dtype=torch.float32).parameters()} == {
        torch.float32
    }


def test_another_vocabulary_is_refused(folder, tiny_target):
    with pytest.raises(UserError, match=r"another one \(288 tokens and 272, id 27\d is "):
        checkpoint.load(folder, Target.load(tiny_target("other_vocab")))


def test_another_tokenizer_is_refused_with_the_difference(folder, target):
    path = folder / "draftsmith.json"
    record = json.loads(path.read_text())
    made_for = record["target"] | {"tokenizer_hash": "0" * 16}
    swapped = [[7, "Z"], *[pair for pair in made_for["tokenizer"]["tokens"] if pair[0] != 7]]
    for tokenizer, shown in (
        (
            {"size": 300, "tokens": swapped},
            r"another one \(300 tokens and 288, id 7 is 'Z' and '[^Z]+'\); train",
        ),
        (made_for["tokenizer"], r"another one \(digests 0000"),
        (None, r"another one \(digests 0000"),  # a record of an older release
    ):
        told = (
            {**made_for, "tokenizer": tokenizer}
            if tokenizer
            else {k: v for k, v in made_for.items() if k != "tokenizer"}
        )
        path.write_text(json.dumps(record | {"target": told}))
        with pytest.raises(UserError, match=shown):
            checkpoint.load(folder, target)


def test_another_revision_is_a_warning(folder, tiny_target, caplog):
    checkpoint.load(folder, Target.load(tiny_target("llama", seed=1), dtype=torch.float32))
    assert "other weights" in caplog.text


def test_nan_weights_are_refused(saved, target):
    _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    name = sorted(name for name in tensors if tensors[name].is_floating_point())[-1]
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="NaN"):
        checkpoint.load(folder, target)


def test_saving_nan_is_refused(saved, target, tmp_path):
    drafter, folder = saved
    before = (folder / "model.safetensors").read_bytes()
    next(drafter.parameters()).data.flatten()[0] = torch.inf
    with pytest.raises(UserError, match="infinite"):
        checkpoint.save(drafter, folder, target)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_missing_and_misshapen_weights(family, target, tmp_path):
    checkpoint.save(small_draft(family, target), tmp_path, target)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if name != "norm.weight"}, path)
    with pytest.raises(UserError, match=r"'norm.weight' is missing"):
        checkpoint.load(tmp_path, target)
    save_file({**tensors, "norm.weight": torch.ones(5)}, path)
    with pytest.raises(UserError, match=r"has shape \[5\] where its config says \[32\]"):
        checkpoint.load(tmp_path, target)
    save_file({**tensors, "extra.weight": torch.ones(5)}, path)
    with pytest.raises(UserError, match=r"'extra.weight' .* has no place"):
        checkpoint.load(tmp_path, target)


def test_truncated_and_missing_files(folder, target):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        checkpoint.load(folder, target)
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        with pytest.raises(UserError):
            checkpoint.load(folder, target)


def test_broken_record(folder, target):
    (folder / "draftsmith.json").write_text('{"schema": 99}')
    with pytest.raises(UserError, match="schema 1"):
        checkpoint.load(folder, target)
    (folder / "draftsmith.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        checkpoint.load(folder, target)


def test_unknown_family(folder, target):
    path = folder / "draftsmith.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"family": "hydra"}))
    with pytest.raises(
        UserError,
        match=(
            "family 'hydra'; known ones are eagle3, p-eagle, mtp, draft-lm, eagle1, medusa, mlp, "
            "dflash, dspark"
        ),
    ):
        checkpoint.load(folder, target)


# Files of weights


SHARDS = {"a": "one.safetensors", "b": "two.safetensors"}
INDEX = "model.safetensors.index.json"


def folder_of(root: Path, *names: str, index: Any = SHARDS, index_name: str = INDEX) -> Path:
    for name in names:
        content = json.dumps({"weight_map": index}) if name == index_name else ""
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("names", "index_name", "found"),
    [
        (("model.safetensors", "pytorch_model.bin"), INDEX, ["model.safetensors"]),
        (("pytorch_model.bin", INDEX), INDEX, ["one.safetensors", "two.safetensors"]),
        (
            ("model.safetensors", "pytorch_model.bin.index.json"),
            "pytorch_model.bin.index.json",
            ["model.safetensors"],
        ),
        (("medusa_lm_head.pt",), INDEX, ["medusa_lm_head.pt"]),
        ((), INDEX, ["model.safetensors"]),
    ],
)
def test_of_several_forms_it_is_safetensors(
    names: tuple[str, ...], index_name: str, found: list[str], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, *names, index_name=index_name)
    assert [path.name for path in weight_files(folder)] == found


@pytest.mark.parametrize(
    "index", [{}, [], None, {"a": ["x"]}, {"a": 5}, {"a": "../x.safetensors"}, {"a": "/x"}]
)
def test_an_index_of_other_than_files_of_its_folder_is_refused(index: Any, tmp_path: Path) -> None:
    folder_of(tmp_path, INDEX, index=index)
    with pytest.raises(UserError, match="names no files of its folder; restore the file"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("pytorch_model.bin",), "model.safetensors"),
        ((), "model.safetensors"),
        ((INDEX, "one.safetensors"), "two.safetensors"),
    ],
)
def test_single_tensors_are_read_from_safetensors_alone(
    names: tuple[str, ...], missing: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"lacks {missing}; fetch or save the model again"):
        safe_files(folder_of(tmp_path, *names))
