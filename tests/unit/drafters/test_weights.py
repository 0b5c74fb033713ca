"""Which files of a folder hold its weights, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafters.weights import safe_files, weight_files
from draftsmith.errors import UserError

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
