"""Stores answers as those that ship, without their prompts but for the ends:
python -m scripts.demo.ship_answers ANSWERS"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.config import for_others
from draftsmith.drafters.text.answers import DEMO, tokens_of
from draftsmith.files import atomic_folder, read_json, write_json

TYPES = pa.schema([("input_ids", pa.list_(pa.uint16())), ("loss_mask", pa.list_(pa.uint8()))])

if __name__ == "__main__":
    source = Path(sys.argv[1])
    rows = [tokens.tolist() for file in sorted(source.glob("part-*")) for tokens in tokens_of(file)]
    table = pa.table({"input_ids": rows, "loss_mask": [[1] * len(row) for row in rows]}, TYPES)
    with atomic_folder(DEMO) as folder:
        pq.write_table(table, folder / "part-00000.parquet", compression="zstd")
        write_json(folder / "provenance.json", for_others(read_json(source / "provenance.json")))
