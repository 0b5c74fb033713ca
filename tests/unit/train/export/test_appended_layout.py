"""A target's own MTP module, trained further: the folder is the target with the new module where
the old one was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftsmith.drafters import checkpoint
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from draftsmith.train.session import older_drafter
from tests.noise import noisy
from tests.unit.train.export.conftest import export

MODULE = "model.layers.2."
SHARED = {f"{MODULE}embed_tokens.weight", f"{MODULE}shared_head.head.weight"}


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_the_new_module_is_where_the_old_one_was(
    native_target: Callable[[str], Path], kind: str, tmp_path: Path
) -> None:
    folder = native_target(kind)
    target = Target.load(folder)
    drafter = older_drafter(str(folder), "mtp", target)
    checkpoint.save(noisy(drafter, 0, 0.1), tmp_path / "tuned", target)
    out = export(tmp_path / "tuned", "vllm")

    old, tuned = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "tuned" / "model.safetensors"),
    )
    weight_map = read_json(out / "model.safetensors.index.json")["weight_map"]
    files = {name: load_file(out / name) for name in set(weight_map.values())}
    new = {name: files[file][name] for name, file in weight_map.items()}
    assert new.keys() == old.keys() and sum(map(len, files.values())) == len(new)
    assert all(torch.equal(new[name], tuned.get(name, old[name])) for name in new)
    changed = {name for name in new if not torch.equal(new[name], old[name])}
    assert changed == {
        name
        for name in old.keys() - SHARED
        if name.startswith(MODULE) and "correction_bias" not in name
    }
    assert read_json(out / "config.json") == read_json(folder / "config.json")
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]


def test_another_target_is_refused(native_target: Callable[[str], Path], tmp_path: Path) -> None:
    folder = native_target("glm4_moe")
    target = Target.load(folder)
    checkpoint.save(checkpoint.load(folder, target), tmp_path / "tuned", target)
    other = str(native_target("deepseek_v3"))
    with pytest.raises(UserError, match="give --target the folder that it was trained from"):
        export(tmp_path / "tuned", "vllm", target=other)


def test_a_target_that_vllm_would_route_otherwise_is_refused(
    native_target: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = native_target("deepseek_v3")
    target = Target.load(folder)
    checkpoint.save(checkpoint.load(folder, target), tmp_path / "tuned", target)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    write_json(other / "config.json", read_json(other / "config.json") | {"scoring_func": None})
    with pytest.raises(UserError, match=r"routes as transformers does by .* alone; put these into"):
        export(tmp_path / "tuned", "vllm", target=str(other))
