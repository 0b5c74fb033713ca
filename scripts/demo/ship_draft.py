"""Stores a trained draft beside the shipped target: bfloat16 weights, its record without paths.

python -m scripts.demo.ship_draft runs/quickstart/shipped-draft
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftsmith.files import atomic_folder, read_json, write_json
from scripts.paths import ROOT

SHIPPED_DRAFT = ROOT / "scripts" / "quickstart_draft"
RECORD, CONFIG, WEIGHTS = "draftsmith.json", "config.json", "model.safetensors"


def ship(draft: Path, out: Path) -> None:
    with atomic_folder(out) as folder:
        weights = load_file(draft / WEIGHTS)
        narrow = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in weights.items()
        }
        save_file(narrow, folder / WEIGHTS, {"format": "pt"})
        config = read_json(draft / CONFIG)
        key = next((key for key in ("dtype", "torch_dtype") if key in config), "dtype")
        write_json(folder / CONFIG, config | {key: "bfloat16"})
        record = without_paths(read_json(draft / RECORD))
        record["target"]["name"] = "scripts/quickstart_target"
        write_json(folder / RECORD, record)


def without_paths(value: Any) -> Any:
    """The value with every absolute path cut down to its last part."""
    if isinstance(value, dict):
        return {key: without_paths(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_paths(one) for one in value]
    if isinstance(value, str) and value.startswith("/"):
        return Path(value).name
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("draft", type=Path)
    parser.add_argument("--out", type=Path, default=SHIPPED_DRAFT)
    arguments = parser.parse_args()
    ship(arguments.draft, arguments.out)
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(json.dumps({"out": str(arguments.out), "bytes": size}))


if __name__ == "__main__":
    main()
