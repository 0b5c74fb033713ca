"""EAGLE-3 drafts as others publish them: each naming is loaded without a record of ours and drafts
what the portable one does."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import UnrollBatch
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from tests.noise import noisy

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
LAYER = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "rope_theta",
    "attention_bias",
)  # fmt: skip


@pytest.fixture
def portable(target: Target, tmp_path: Path) -> Path:
    """Ours, with the taps that engines and trainers take where a config names none."""
    counts = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(3))
    options = Eagle3Options(draft_vocab_size=100)
    drafter = Eagle3.create(options, target, seed=0, token_counts=counts)
    noisy(drafter, 1, 0.2).save(tmp_path / "portable")
    return tmp_path / "portable"


def first_eagle3(folder: Path, config: Config, tensors: Tensors, target: Target) -> None:
    """yuhuili's: no layer ids, no width of the target, weights pickled."""
    kept = {
        key: config[key]
        for key in (*LAYER, "draft_vocab_size", "model_type", "tie_word_embeddings")
    }
    write_json(
        folder / "config.json", {**kept, "architectures": ["LlamaForCausalLMEagle3"], "bias": False}
    )
    torch.save(tensors, folder / "pytorch_model.bin")


def specforge(folder: Path, config: Config, tensors: Tensors, target: Target) -> None:
    """Layer ids under `eagle_config` alone, counted by outputs; the target's embeddings
    come along."""
    kept = {
        key: value for key, value in config.items() if not key.startswith(("eagle_aux", "num_aux"))
    }
    write_json(folder / "config.json", kept)
    save_file(
        {**tensors, "embed_tokens.weight": target.embed(torch.arange(target.vocab_size))},
        folder / "model.safetensors",
    )


def speculators(folder: Path, config: Config, tensors: Tensors, target: Target) -> None:
    """Red Hat's: the layer nested, its tensors under `layers.0.`, the norms' flags at the top."""
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    values = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_version": (
            "0.1.0"
        ),
        "draft_vocab_size": config["draft_vocab_size"], "target_hidden_size": None,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": None,
        "transformer_layer_config": {key: config[key] for key in LAYER} | {"model_type": "llama"},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target.name, "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip
    write_json(folder / "config.json", values)
    save_file(
        {**named, "embed_tokens.weight": target.embed(torch.arange(target.vocab_size))},
        folder / "model.safetensors",
    )


def sharded(folder: Path, config: Config, tensors: Tensors, target: Target) -> None:
    """Under vLLM's name for the model, its weights in two files."""
    names = sorted(tensors)
    write_json(folder / "config.json", config | {"architectures": ["Eagle3LlamaForCausalLM"]})
    files = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})


@torch.no_grad()
def distributions(folder: Path, target: Target) -> list[torch.Tensor]:
    drafter = checkpoint.load(folder, target)
    assert isinstance(drafter, Eagle3) and drafter.vocab_map is not None
    ids = torch.randint(3, target.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    taps, _ = target.states(ids, torch.ones_like(ids), drafter.taps)
    batch = UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=3)
    found = [step.hidden @ drafter.head_weight().T for step in drafter.unroll(batch)]
    return [*found, drafter.vocab_map]


@pytest.mark.parametrize("publish", [first_eagle3, specforge, speculators, sharded])
def test_a_published_draft_is_the_draft_it_is(
    publish: Callable[..., None], portable: Path, target: Target, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    publish(
        folder,
        read_json(portable / "config.json"),
        load_file(portable / "model.safetensors"),
        target,
    )
    for theirs, ours in zip(
        distributions(folder, target), distributions(portable, target), strict=True
    ):
        torch.testing.assert_close(theirs, ours)


class Dropper:
    """What a pickle could do to its reader."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickled_weights_run_no_code(portable: Path, target: Target, tmp_path: Path) -> None:
    (portable / "model.safetensors").unlink()
    (portable / "pytorch_model.bin").write_bytes(pickle.dumps(Dropper(tmp_path / "dropped")))
    with pytest.raises(UserError, match="hold more than tensors or are damaged") as caught:
        checkpoint.load(portable, target)
    assert "\n" not in str(caught.value) and not (tmp_path / "dropped").exists()
