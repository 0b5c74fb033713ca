"""Stores answers as those that ship, without their prompts but for the ends:
python -m scripts.demo.ship_answers ANSWERS"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.config import for_others
from draftsmith.drafters.text.answers import DEMO, tokens_of
from draftsmith.files import atomic_folder, read_json, write_json

if __name__ == "__main__":
    source = Path(sys.argv[1])
    rows = [text.tolist() for file in sorted(source.glob("part-*")) for text in tokens_of(file)]
    table = pa.table({"input_ids": rows, "loss_mask": [[1] * len(row) for row in rows]})
    with atomic_folder(DEMO) as folder:
        pq.write_table(table, folder / "part-0.parquet", compression="zstd", compression_level=19)
        write_json(folder / "provenance.json", for_others(read_json(source / "provenance.json")))
