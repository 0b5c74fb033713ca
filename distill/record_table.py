"""Round records as an Arrow table: one row a round, laws as nested lists; the schema's version in every row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from draftsmith.serve.record import SCHEMA_VERSION, Law, RoundRecord

_LAW_FIELDS = {
    "ids": pa.list_(pa.list_(pa.int32())),
    "logprobs": pa.list_(pa.list_(pa.float32())),
    "tail": pa.list_(pa.float32()),
}
_LAWS = ("p", "q")

SCHEMA = pa.schema(
    [
        ("request", pa.string()),
        ("round", pa.int32()),
        ("request_class", pa.string()),
        ("target", pa.string()),
        ("target_revision", pa.string()),
        ("draft_version", pa.string()),
        ("time_s", pa.float64()),
        ("temperature", pa.float32()),
        ("top_k", pa.int32()),
        ("top_p", pa.float32()),
        ("min_p", pa.float32()),
        ("position", pa.int32()),
        ("context", pa.list_(pa.int32())),
        ("drafted", pa.list_(pa.int32())),
        ("accepted", pa.int32()),
        ("committed", pa.list_(pa.int32())),
        ("emitted", pa.int32()),
        ("p_log_norm", pa.list_(pa.float32())),
        ("schema", pa.int32()),
        *[(f"{law}_{part}", kind) for law in _LAWS for part, kind in _LAW_FIELDS.items()],
    ],
    metadata={"draftsmith.round_record": str(SCHEMA_VERSION)},
)
_SCALARS = [field.name for field in dataclasses.fields(RoundRecord) if field.name not in _LAWS]


def to_table(records: Sequence[RoundRecord]) -> pa.Table:
    arrays = {name: pa.array([getattr(record, name) for record in records], SCHEMA.field(name).type) for name in _SCALARS}
    for law in _LAWS:
        arrays.update(_law_arrays(law, [getattr(record, law) for record in records]))
    return pa.Table.from_arrays([arrays[name] for name in SCHEMA.names], schema=SCHEMA)


def _law_arrays(law: str, rows: list[list[Law]]) -> dict[str, pa.Array]:
    """Built from flat arrays: Arrow takes nested Python lists several times slower, on the server's machine."""
    laws = list(itertools.chain.from_iterable(rows))
    per_row = _offsets([len(row) for row in rows])
    per_law = _offsets([len(one.ids) for one in laws])
    ids = np.fromiter(itertools.chain.from_iterable(one.ids for one in laws), np.int32)
    logprobs = np.fromiter(itertools.chain.from_iterable(one.logprobs for one in laws), np.float32)
    tail = np.fromiter((one.tail for one in laws), np.float32, len(laws))
    return {
        f"{law}_ids": pa.ListArray.from_arrays(per_row, pa.ListArray.from_arrays(per_law, pa.array(ids))),
        f"{law}_logprobs": pa.ListArray.from_arrays(per_row, pa.ListArray.from_arrays(per_law, pa.array(logprobs))),
        f"{law}_tail": pa.ListArray.from_arrays(per_row, pa.array(tail)),
    }


def _offsets(lengths: Iterable[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(list(lengths))]).astype(np.int32))


def from_table(table: pa.Table) -> list[RoundRecord]:
    """A `ValueError` on a table of another schema."""
    missing = [name for name in SCHEMA.names if name not in table.column_names]
    if missing:
        raise ValueError(f"lacks column {missing[0]!r}")
    if table.num_rows and max(table["schema"].to_pylist()) > SCHEMA_VERSION:
        raise ValueError(f"holds records of a newer schema than {SCHEMA_VERSION}")
    columns = {name: table[name].to_pylist() for name in _SCALARS}
    laws = {law: _laws(table, law) for law in _LAWS}
    rows = []
    for index in range(table.num_rows):
        scalars = {name: column[index] for name, column in columns.items()}
        rows.append(RoundRecord(**scalars, p=laws["p"][index], q=laws["q"][index]))
    return rows


def _laws(table: pa.Table, law: str) -> list[list[Law]]:
    ids, logprobs, tails = (table[f"{law}_{part}"].to_pylist() for part in _LAW_FIELDS)
    return [[Law(*parts) for parts in zip(*row, strict=True)] for row in zip(ids, logprobs, tails, strict=True)]


def without_laws(record: RoundRecord) -> RoundRecord:
    """For the reservoir: training recomputes the target's laws, so that only the gate needs the logged ones."""
    return dataclasses.replace(record, p=[], p_log_norm=[], q=[])
