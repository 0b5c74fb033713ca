"""Layers that stay in their files: what is read when, and files that do not allow it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters.target.load import load_model
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError


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
