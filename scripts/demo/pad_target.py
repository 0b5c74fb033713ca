"""A target with the text of a small one and the price of a large one, for speeds where no large
model is at hand. The units added to every MLP are random, as those of a new model, and their
columns of the down-projection are zero: what they compute is multiplied by zero, whatever it is.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.drafters.target.load import build_model, load_model
from draftsmith.drafters.target.target import SAME_AS, revision_of
from draftsmith.files import atomic_folder, write_json
from scripts.paths import ROOT

MULTIPLE = 64  # of the added units, for the sake of matrix products
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "*.jinja")


def pad(source: PreTrainedModel, parameters: int, *, seed: int = 0) -> PreTrainedModel:
    """A dense model of about `parameters` parameters with the logits of `source`, in its dtype."""
    width = source.config.intermediate_size
    growing = [w for w in source.parameters() if w.ndim == 2 and width in w.shape]
    per_unit = sum(weight.numel() // width for weight in growing)
    added = round((parameters - count(source)) / per_unit / MULTIPLE) * MULTIPLE
    if added <= 0:
        raise ValueError(f"the source has {count(source):,} parameters, not below {parameters:,}")
    config = copy.deepcopy(source.config)
    config.intermediate_size = width + added
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        padded = build_model(config, trust_remote_code=False, dtype=source.dtype).eval()
    ours = padded.state_dict()
    with torch.no_grad():
        for name, weight in source.state_dict().items():
            into = ours[name]
            if into.shape == weight.shape:
                into.copy_(weight)
            elif into.shape[0] == weight.shape[0]:
                into[:, :width] = weight
                into[:, width:] = 0
            else:
                into[:width] = weight
    return padded


def make(folder: Path, out: Path, parameters: int) -> dict[str, Any]:
    """Pads the checkpoint in `folder` and writes it to `out` with its tokenizer."""
    source = load_model(folder, trust_remote_code=False)
    padded = pad(source, parameters)
    record = {
        "source": folder.name,
        "source_parameters": count(source),
        "parameters": count(padded),
    }
    with atomic_folder(out) as temporary:
        padded.save_pretrained(temporary)
        for pattern in TOKENIZER_FILES:
            for file in folder.glob(pattern):
                shutil.copy(file, temporary)
        config = json.loads((temporary / "config.json").read_text(encoding="utf-8"))
        same = {SAME_AS: revision_of(source), "padded": record}
        write_json(temporary / "config.json", config | same)
    return record


def count(model: PreTrainedModel) -> int:
    return sum(weight.numel() for weight in model.parameters())


def number(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if found is None:
        raise ValueError(f"{text!r} is no number such as 100M or 400M")
    return round(float(found[1]) * UNITS[found[2]])


def padded_target(target: Path, parameters: str | None) -> Path:
    """The target, or the target padded, which is kept in `runs`; None pads nothing."""
    if parameters is None:
        return target
    out = ROOT / "runs" / f"{target.name}-{parameters}"
    if not out.exists():
        print(f"padding the target to {parameters} parameters", flush=True)
        make(target, out, number(parameters))
    return out
