"""A drafter small enough to know everything about: its state depends on the last known token and
the depth only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from draftsmith.drafters.interface import UnrollBatch, UnrolledStep
from draftsmith.files import write_json


class TableDrafter(torch.nn.Module):
    """At depth s the token at j is drafted from the token at j - 1 - s, its round's anchor; offset
    2 as feature heads have."""

    taps: tuple[int, ...] = (1, 2)
    vocab_map: torch.Tensor | None = None

    def __init__(self, vocab_size: int, *, hidden: int = 8, depths: int = 8, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(
            torch.randn(depths, vocab_size, hidden, generator=generator)
        )
        self.head = torch.nn.Parameter(torch.randn(vocab_size, hidden, generator=generator))

    def head_weight(self) -> torch.Tensor:
        return self.head

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        position = torch.arange(batch.input_ids.shape[1])
        real = batch.attention_mask.bool()
        for depth in range(batch.num_steps):
            anchor = (position + 1 - depth).clamp(min=0, max=len(position) - 1)
            valid = real & (position >= depth)
            yield UnrolledStep(
                hidden=self.table[depth][batch.input_ids[:, anchor]], valid=valid, offset=2
            )


@pytest.fixture
def table_drafter() -> Callable[..., TableDrafter]:
    return TableDrafter


@pytest.fixture
def write_data(tmp_path: Path) -> Callable[..., Path]:
    """`write_data(rows)` writes a data folder; each row a dict of columns."""

    def write(rows: list[dict], *, name: str = "data", provenance: dict | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / "part-00000.parquet")
        write_json(
            folder / "provenance.json",
            provenance or {"target": "t", "temperature": 1.0, "top_k": 0, "top_p": 1.0},
        )
        return folder

    return write
