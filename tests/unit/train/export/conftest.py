"""Targets whose own kind has an MTP module, and drafts whose weights no default gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.files import read_json
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.command import run
from tests.noise import noisy
from tests.unrolled import unroll_batch

APPENDED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
Find = Callable[..., str]
FindNative = Callable[[str], Path]


@pytest.fixture
def without_module(tiny_target: Find, native_target: FindNative) -> Callable[[str], Path]:
    """Folder of a target of the kind that has lost its module, as fine-tunes do."""
    return lambda kind: (
        native_target(kind) / "whole" if kind in APPENDED else Path(tiny_target(kind))
    )


def saved(family: str, of: Target, folder: Path, *, noise: float = 0.1, **options: Any) -> Path:
    """A draft with noise in all its weights."""
    counts = torch.randperm(of.vocab_size, generator=torch.Generator().manual_seed(5))
    drafter = FAMILIES[family].create(OPTIONS[family](**options), of, seed=0, token_counts=counts)
    checkpoint.save(noisy(drafter, 1, noise), folder, of)
    return folder


def export(draft: Path, to: str, **options: Any) -> Path:
    out = draft.with_name(f"{draft.name}-{to}")
    run(ExportConfig(draft=str(draft), to=to, out=str(out), **options))
    return out


@torch.no_grad()
def unrolled(folder: Path, of: Target) -> list[torch.Tensor]:
    """Logits of three depths."""
    drafter = checkpoint.load(folder, of)
    ids = torch.randint(3, of.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = unroll_batch(drafter, of, ids, 3)
    return [step.hidden @ drafter.head_weight().T for step in drafter.unroll(batch)]


def stitched_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of a target and the module in it, by the index of all."""
    weight_map = read_json(folder / "model.safetensors.index.json")["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert sum(map(len, files.values())) == len(weight_map), "the index names every tensor once"
    return {name: files[file][name] for name, file in weight_map.items()}
