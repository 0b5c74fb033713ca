"""Code that a model's folder brings is run where that was allowed, and nowhere else; nobody is
asked on the terminal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.config import named_folders
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.lm.foreign_lm import ForeignLm
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.target.adapters import Adapters
from draftsmith.drafters.target.load import (
    build_model,
    load_config,
    load_end_ids,
    load_model,
    load_tokenizer,
)
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from tests.conftest import save_adapter

LOADERS: dict[str, Callable[..., Any]] = {
    "model": load_model,
    "config": load_config,
    "tokenizer": load_tokenizer,
}
IDS = torch.tensor([[3, 5, 7, 11]])


@pytest.mark.parametrize("what", LOADERS)
def test_code_of_a_folder_needs_leave(what, own_code):
    folder = own_code.make()
    with pytest.raises(UserError, match="trust-remote-code") as caught:
        LOADERS[what](folder, trust_remote_code=False)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert not own_code.has_run and not own_code.was_asked
    LOADERS[what](folder, trust_remote_code=True)
    assert own_code.has_run and not own_code.was_asked


@pytest.mark.parametrize("what", LOADERS)
def test_code_of_an_adapters_base_needs_leave(what, own_code, tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(own_code.make())})
    )
    with pytest.raises(UserError, match="trust-remote-code"):
        LOADERS[what](tmp_path, trust_remote_code=False)
    assert not own_code.has_run and not own_code.was_asked


def test_a_class_of_transformers_loads_beside_code_that_is_not_run(own_code):
    folder = own_code.make("llama")
    target = Target.load(folder)
    assert type(target.model).__module__.startswith("transformers.")
    target.tokenizer()
    assert not own_code.has_run and not own_code.was_asked


def test_a_target_of_own_code_and_drafts_for_it(tiny_target, own_code):
    """The target's leave is that of its drafts: one made of its layers, one begun from a model, one
    read from a folder."""
    folder = own_code.make()
    target = Target.load(folder, dtype=torch.float32, trust_remote_code=True)
    assert type(target.model).__name__ == "OwnForCausalLM"
    plain = Target.load(tiny_target("llama"), dtype=torch.float32)
    expected = plain.states(IDS, torch.ones_like(IDS), ())[1]
    torch.testing.assert_close(target.states(IDS, torch.ones_like(IDS), ())[1], expected)
    for options in (DraftLmOptions(target_layers=(0, 2)), DraftLmOptions(init=str(folder))):
        draft = DraftLm.create(options, target, seed=0)
        assert type(draft.model).__name__ == "OwnForCausalLM"
    assert isinstance(checkpoint.load(folder, target), DraftLm)
    assert isinstance(checkpoint.load(folder, target, foreign=True), ForeignLm)
    with pytest.raises(UserError, match="trust-remote-code"):
        DraftLm.create(DraftLmOptions(init=str(folder)), plain, seed=0)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_draft_of_own_code_needs_leave(foreign, tiny_target, own_code):
    folder = own_code.make()
    with pytest.raises(UserError, match="trust-remote-code") as caught:
        checkpoint.load(folder, Target.load(tiny_target("llama")), foreign=foreign)
    assert str(folder) in str(caught.value)
    assert not own_code.has_run and not own_code.was_asked


def test_a_model_built_from_a_configuration_alone(own_code):
    folder = own_code.make("llama")
    config = load_config(folder, trust_remote_code=False)
    assert type(build_model(config, trust_remote_code=False)).__module__.startswith("transformers.")
    assert not own_code.has_run and not own_code.was_asked
    own = load_config(folder, trust_remote_code=True)
    assert type(build_model(own, trust_remote_code=True)).__name__ == "OwnForCausalLM"
    assert own_code.has_run


def test_the_terminal_would_be_asked_by_a_call_that_says_nothing(own_code):
    """Control: what every loader here is spared."""
    from transformers import AutoConfig

    folder = own_code.make()
    AutoConfig.from_pretrained(folder)
    assert own_code.has_run and own_code.was_asked


def test_a_tokenizer_of_an_unknown_kind_is_refused_in_one_sentence(tmp_path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Nope"}}')
    with pytest.raises(UserError, match=r"no tokenizer can be loaded from .*; add its files"):
        load_tokenizer(tmp_path, trust_remote_code=False)


@pytest.mark.parametrize("text", ["[]", "{", '{"eos_token_id": 7}'])
def test_answers_end_as_the_first_readable_file_says(tiny_target, tmp_path, text) -> None:
    folder = shutil.copytree(tiny_target("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    ends = load_end_ids(folder, trust_remote_code=False)
    assert ends == ((7,) if "7" in text else (0,))


# Layers that stay in their files


def opened(folder: str) -> Any:
    return load_model(folder, trust_remote_code=False, dtype=torch.float32, offload="disk")


def test_lacking_weights_and_other_formats_are_refused(
    tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_target("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if "layers.1.input_layernorm" not in key}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 of its weights, .*layers\.1\.input_layernorm"):
        opened(str(folder))
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="are no safetensors"):
        opened(str(folder))


def test_a_module_that_reads_weights_of_another_is_refused_with_the_mend(
    tiny_target: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As RecurrentGemma reads its convolution's: outside of that one's forward they are in the
    files."""
    model = opened(tiny_target("llama"))
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda given: own(given) * mlp.down_proj.weight[:, 0])
    with pytest.raises(
        UserError, match=r"with target_offload: .*; leave target_offload out"
    ) as told:
        Target(model, "reader")
    assert "another model" not in str(told.value) and "\n" not in str(told.value)


# Adapters that cannot be served, and options that name none


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
