"""The outline of a target is the target, but for its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.objective import outline as target_outline
from draftsmith.train.objective.outline import load_outline


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_an_outline_is_named_as_its_target_and_holds_no_weights(
    tiny_target: Callable[..., str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(tiny_target(kind))
    monkeypatch.setattr(target_outline, "load_model", None)
    outline = load_outline(tiny_target(kind), trust_remote_code=False)
    assert checkpoint.identity(outline) == checkpoint.identity(target)
    assert (outline.hidden_size, outline.max_positions) == (
        target.hidden_size,
        target.max_positions,
    )
    assert {one.device.type for one in outline.model.parameters()} == {"meta"}
    assert outline.device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="has no weights to run"):
        outline.head(torch.zeros(1, 1))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_tables_of_tokens_are_read_alone_and_from_the_files(
    tiny_target: Callable[..., str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(tiny_target(kind))
    monkeypatch.setattr(target_outline, "load_model", None)
    outline = load_outline(tiny_target(kind), trust_remote_code=False)
    ids = torch.tensor([[3, 200, 7]])
    assert torch.equal(outline.embed(ids), target.embed(ids))
    assert torch.equal(outline.output_weight, target.output_weight)


def test_an_embedding_that_is_no_plain_table_is_refused(tiny_target: Callable[..., str]) -> None:
    outline = load_outline(tiny_target("gemma3"), trust_remote_code=False)
    with pytest.raises(UserError, match="does more than look its input tokens up in a table"):
        outline.embed(torch.tensor([3]))


def test_tables_of_files_with_other_names_are_read_with_all_weights(
    tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    for path in Path(tiny_target("llama")).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    bare = {one.removeprefix("model."): values for one, values in weights.items()}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    outline = load_outline(str(tmp_path), trust_remote_code=False)
    ids = torch.tensor([[3, 200, 7]])
    assert torch.equal(outline.embed(ids), Target.load(tmp_path).embed(ids))


def test_new_weights_and_other_names_are_seen(
    tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    for path in Path(tiny_target("llama")).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "mlp" in name)
    weights[name] = weights[name] + 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    changed = load_outline(str(tmp_path), trust_remote_code=False).revision
    assert changed == Target.load(tmp_path).revision
    assert changed != Target.load(tiny_target("llama")).revision
    # A base model's names, which transformers makes a causal LM's while it loads them.
    bare = {one.removeprefix("model."): values for one, values in weights.items()}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_outline(str(tmp_path), trust_remote_code=False).revision == changed
