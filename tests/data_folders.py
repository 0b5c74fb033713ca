"""Folders of texts with masked prompts, as `draftsmith generate` leaves them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import tokenizer_hash
from draftsmith.files import write_json

Rows = list[dict[str, Any]]


def rows_of(
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    *,
    held_out: Container[int] | None = None,
) -> Rows:
    """Texts named by their numbers; `held_out` are the numbers of those that are not trained on."""
    rows: Rows = [
        {
            "name": f"{number}",
            "input_ids": prompt + answer,
            "loss_mask": [0] * len(prompt) + [1] * len(answer),
        }
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    if held_out is not None:
        for number, row in enumerate(rows):
            row["split"] = "held-out" if number in held_out else "train"
    return rows


def write_rows(folder: Path, rows: Rows, provenance: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "part-00000.parquet")
    if provenance is not None:
        write_json(folder / "provenance.json", provenance)
    return folder


def sampled_from(target: Target) -> dict[str, Any]:
    """Provenance of a target's answers at temperature 1."""
    return {
        "target": target.name, "target_revision": target.revision, "temperature": 1.0, "top_k": 0,
        "top_p": 1.0, "tokenizer_hash": tokenizer_hash(target.tokenizer()),
    }  # fmt: skip
