"""The on-policy texts that wait for their steps, kept in every checkpoint: the weights that they were drafted with are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from draftsmith.drafters.speculate import Round, SpeculatedText
from draftsmith.files import read_json, write_json
from draftsmith.train.on_policy import OnPolicy


class KeepTexts(TrainerCallback):
    """Must be added before whoever marks a checkpoint as complete."""

    def __init__(self, on_policy: OnPolicy):
        self.on_policy = on_policy

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        save_texts(self.on_policy, folder, world_size=args.world_size)


def save_texts(on_policy: OnPolicy, checkpoint: Path, *, world_size: int) -> None:
    texts = None if on_policy.waiting is None else [text._asdict() for text in on_policy.waiting]
    write_json(_path(checkpoint, on_policy.rank), {"version": 1, "world_size": world_size, "texts": texts})


def load_texts(on_policy: OnPolicy, checkpoint: Path, *, world_size: int) -> None:
    """With another number of processes the texts are not theirs, and new ones are written at the next step."""
    path = _path(checkpoint, on_policy.rank)
    record = read_json(path, "on-policy texts") if path.is_file() else {"texts": None}
    if record["texts"] is None or record["world_size"] != world_size:
        return
    on_policy.waiting = [
        SpeculatedText(text["tokens"], text["num_prompt"], [Round(*values) for values in text["rounds"]])
        for text in record["texts"]
    ]


def _path(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"on_policy-{rank}.json"
