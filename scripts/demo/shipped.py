"""The target and the EAGLE-3 draft that ship, and a checkpoint in another type."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftsmith.files import read_json, write_json
from scripts.paths import ROOT

SHIPPED_TARGET = ROOT / "scripts" / "quickstart_target"
SHIPPED_DRAFT = ROOT / "scripts" / "quickstart_draft"


def in_dtype(source: Path, out: Path, dtype: str) -> Path:
    """A copy of a checkpoint whose weights are stored in `dtype`."""
    shutil.copytree(source, out, dirs_exist_ok=True)
    weights = load_file(out / "model.safetensors")
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    write_json(out / "config.json", read_json(out / "config.json") | {"dtype": dtype})
    return out
