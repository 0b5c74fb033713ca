"""Stored states are written and read a text at a time, however many a shard has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.train.data.stored_taps import StatesOf, TapLayout, TapWriter, tap_file, writing
from tests.peak_memory import memory_of

TOKENS, WIDTH = 32, 64
FLOAT32 = TOKENS * WIDTH * 3 * 4  # of a text: two taps and the final state


def fill(path: Path, precision: str, count: int) -> int:
    """Writes a shard of so many texts; returns the most bytes held at once."""
    layout = TapLayout((0, 2), WIDTH, precision)
    path.write_bytes(b"a shard")

    def put(writer: TapWriter) -> None:
        for row in range(count):
            writer.put(row, torch.randn(TOKENS, 2 * WIDTH), torch.randn(TOKENS, WIDTH))

    with writing(path, layout, [TOKENS] * count, revision="r") as writer:
        return memory_of(lambda: put(writer)).peak


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_no_more_than_a_text_is_held(tmp_path: Path, precision: str) -> None:
    short, long = tmp_path / "part-00000.parquet", tmp_path / "part-00001.parquet"
    written = [fill(path, precision, count) for path, count in ((short, 4), (long, 64))]
    assert FLOAT32 <= written[0] == written[1] < 4 * FLOAT32
    read = []
    for path in (short, long):
        states = StatesOf(tap_file(path))
        read.append(memory_of(lambda states=states: states.read(3, 0, TOKENS)).peak)
    assert FLOAT32 <= read[0] == read[1] < 4 * FLOAT32
