"""The draft that ships beside the target: how it is trained, and how a trained one is stored, in
bfloat16 and without paths in its record.

scripts/quickstart --train
python -m scripts.demo.ship_draft runs/quickstart/shipped-draft
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftsmith.config import for_others
from draftsmith.files import atomic_folder, read_json, write_json
from scripts.demo.shipped import SHIPPED_DRAFT

TARGET = "scripts/quickstart_target"
RECORD, CONFIG, WEIGHTS = "draftsmith.json", "config.json", "model.safetensors"
TRAINING = "training.json"
DATA, OUT = "draft-data", "shipped-draft"  # in the run's folder
# Answers to prompts out of files that the bench's prompts are not from, half of them greedy.
ANSWERS = 16000
# 24 minutes of CPU time on a busy machine.
STEPS = 13500


def generate_words(target: str | Path, data: str | Path) -> list[str | Path]:
    """The draft's data, as a command."""
    return [
        "generate", "--target", target, "--prompts", "stdlib:code", "--split", "train",
        "--count", str(ANSWERS), "--prompt-tokens", "48", "--max-tokens", "112",
        "--temperature", "0", "1", "--batch", "64", "--seed", "7", "--out", data,
    ]  # fmt: skip


def train_words(target: str | Path, data: str | Path, out: str | Path) -> list[str | Path]:
    """The draft's training, as a command. The residual stream starts from the normed state, which
    keeps late drafts alive as `norm_output` does, and llama.cpp, OpenVINO and vLLM read it."""
    return [
        "train", "eagle3", "--target", target, "--data", data, "--out", out,
        "--steps", str(STEPS), "recipes/eagle3-small.yaml",
        "draft.norm_output=false", "draft.norm_before_residual=true",
    ]  # fmt: skip


def ship(draft: Path, out: Path) -> None:
    with atomic_folder(out) as folder:
        narrow = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in load_file(draft / WEIGHTS).items()
        }
        save_file(narrow, folder / WEIGHTS, {"format": "pt"})
        config = read_json(draft / CONFIG)
        key = next((key for key in ("dtype", "torch_dtype") if key in config), "dtype")
        write_json(folder / CONFIG, config | {key: "bfloat16"})
        record = for_others(read_json(draft / RECORD))
        record["target"]["name"] = TARGET
        write_json(folder / RECORD, record)
        write_json(folder / TRAINING, training())


def training() -> dict[str, str]:
    """Commands that made the shipped draft, from the first to the last."""
    target, data, out = (f"runs/quickstart/{name}" for name in ("target", DATA, OUT))
    words = {"generate": generate_words(target, data), "train": train_words(target, data, out)}
    return {
        "command": "scripts/quickstart --train",
        **{stage: " ".join(["draftsmith", *map(str, those)]) for stage, those in words.items()},
        "store": f"python -m scripts.demo.ship_draft {out}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("draft", type=Path)
    parser.add_argument("--out", type=Path, default=SHIPPED_DRAFT)
    ship(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
