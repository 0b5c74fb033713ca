"""Adapters that cannot be served, and options that name none, are refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.drafters.config import named_folders
from draftsmith.drafters.target.adapters import Adapters
from draftsmith.drafters.target.load import load_model
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from tests.conftest import save_adapter


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, "it replaces 'lm_head'"),
        ({"use_dora": True}, "it changes .* by more than a plain LoRA"),
        ({"target_modules": ["embed_tokens"]}, "it changes .* by more than a plain LoRA"),
        ({"bias": "all"}, "its bias is 'all', more than a plain LoRA"),
        ({"layer_replication": [(0, 2), (1, 4)]}, "its layer_replication is"),
        ({"init_lora_weights": "olora"}, "it changes weights of the target"),
    ],
)
def test_adapters_that_change_more_are_refused(tiny_target, tmp_path, settings, reason):
    folder = save_adapter(tiny_target("llama"), tmp_path, **settings)
    with pytest.raises(UserError, match=f"^lora 'one' .* cannot be served: {reason}"):
        Adapters.load(Target.load(tiny_target("llama")), {"one": folder})


def test_other_folders_are_refused_in_one_sentence(tiny_target, tmp_path):
    with pytest.raises(UserError, match=r"lora 'one' .* does not load") as caught:
        Adapters.load(Target.load(tiny_target("llama")), {"one": str(tmp_path)})
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="it does not load"):
        other = save_adapter(tiny_target("qwen3"), tmp_path / "other")
        Adapters.load(Target.load(tiny_target("llama")), {"one": other})


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_torn_weights_are_refused_in_one_sentence(tiny_target, tmp_path, name):
    folder = Path(save_adapter(tiny_target("llama"), tmp_path))
    (folder / "adapter_model.safetensors").unlink()
    (folder / name).write_bytes(b"torn")
    with pytest.raises(UserError, match="it does not load"):
        Adapters.load(Target.load(tiny_target("llama")), {"one": str(folder)})
    with pytest.raises(UserError, match=r"cannot be merged into .*; check its files"):
        load_model(folder, trust_remote_code=False)


def test_names_are_given_once_and_with_a_folder():
    assert named_folders(["sql=a=b", "prose=c"]) == {"sql": "a=b", "prose": "c"}
    for entries, reason in ((["sql"], "give NAME=FOLDER"), (["a=b", "a=c"], "'a' twice")):
        with pytest.raises(UserError, match=reason):
            named_folders(entries)
