"""Round records as an Arrow table: one row a round, distributions as nested lists; the schema's
version in every row.

A logprob is stored as a *surprisal*, -logprob in steps of 1/1024 nat: half a step is an error of at
most 0.05 % of the probability, so that no alpha between stored distributions is off by more than
0.0005, and compressed columns take a third of the room.

Hidden states, where a server records them, are the bytes of bfloat16 numbers, little-endian: n rows
of `taps_width`, the layers `taps_layers` one after another in each, from position `taps_begin` on.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import operator
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.record import (
    NOTHING,
    SCHEMA_VERSION,
    Distributions,
    ProbArrays,
    RecordedTaps,
    RoundRecord,
)

STEPS = 1024  # of a surprisal a nat
MOST = 2**16 - 1
_DISTRIBUTIONS = ("p", "q")
_KINDS = {
    "str": pa.string(),
    "int": pa.int32(),
    "float": pa.float32(),
    "bool": pa.bool_(),
    "list[int]": pa.list_(pa.int32()),
}
_SCALARS = {
    one.name: _KINDS[str(one.type)] for one in dataclasses.fields(RoundRecord) if one.type in _KINDS
} | {"time_s": pa.float64()}
_SCALARS_OF = operator.attrgetter(*_SCALARS)
_DISTRIBUTION_FIELDS = {
    "ids": pa.list_(pa.list_(pa.int32())),
    "surprisal": pa.list_(pa.list_(pa.uint16())),
    "tail": pa.list_(pa.float32()),
    "drafted": pa.list_(pa.float32()),
}
# Null in records without states.
_TAPS = {
    "taps": pa.large_binary(),
    "taps_begin": pa.int32(),
    "taps_width": pa.int32(),
    "taps_layers": pa.list_(pa.int32()),
}
_BITS = np.dtype("<u2")  # of a bfloat16
SCHEMA = pa.schema(
    [
        *_SCALARS.items(),
        *[
            (f"{distribution}_{part}", kind)
            for distribution in _DISTRIBUTIONS
            for part, kind in _DISTRIBUTION_FIELDS.items()
        ],
        ("p_log_norm", pa.list_(pa.float32())),
        *_TAPS.items(),
    ],
    metadata={"draftsmith.round_record": str(SCHEMA_VERSION)},
)
# The bytes of numbers that are alike stand together: two of an id's four are nearly always 0.
_SPLIT = [
    f"{distribution}_{part}.list.element.list.element"
    for distribution in _DISTRIBUTIONS
    for part in ("ids", "surprisal")
]
_PLAIN = dict.fromkeys(("time_s", "position", "round"), "PLAIN")


def write(table: pa.Table, where: io.BytesIO | str) -> None:
    dictionary = [
        name for name in _SCALARS if name not in _PLAIN and not pa.types.is_list(_SCALARS[name])
    ]
    encoding = dict.fromkeys(_SPLIT, "BYTE_STREAM_SPLIT") | _PLAIN
    pq.write_table(
        table,
        where,
        compression="zstd",
        use_dictionary=dictionary,
        column_encoding=encoding,
        write_statistics=False,  # unused: a shard is read whole
        write_page_checksum=True,
    )


def read(
    where: io.BytesIO, columns: list[str] | None = None, *, with_taps: bool = True
) -> pa.Table:
    """Reads a Parquet file. Raises `ValueError` or `OSError` on damage. Without `with_taps` hidden
    states, most of a record's bytes, are left unread."""
    try:
        if columns is None and not with_taps:
            columns = [name for name in pq.read_schema(where).names if name not in _TAPS]
        return pq.read_table(where, columns=columns, page_checksum_verification=True)
    except pa.ArrowException as error:
        # Flipped bits in what no checksum covers make others of it too.
        raise ValueError(f"{type(error).__name__}: {error}") from error


def to_table(records: Sequence[RoundRecord]) -> pa.Table:
    columns = list(zip(*map(_SCALARS_OF, records), strict=True)) or [()] * len(_SCALARS)
    arrays = {
        name: pa.array(values, kind)
        for (name, kind), values in zip(_SCALARS.items(), columns, strict=True)
    }
    arrays |= _prob_arrays("p", [record.p for record in records]) | _prob_arrays(
        "q", [record.q for record in records]
    )
    arrays |= _tap_arrays([record.taps for record in records])
    return pa.Table.from_arrays([arrays[name] for name in SCHEMA.names], schema=SCHEMA)


def _prob_arrays(distribution: str, rows: Sequence[Distributions]) -> dict[str, pa.Array]:
    """Arrays of distributions, built from flat arrays of many rows at once: Arrow takes nested
    Python lists several times slower, and the engine's thread waits while Python works here."""
    parts = Distributions.runs(row for row in rows if row)
    ids = _joined([part.ids.ravel() for part in parts], np.int32)
    logprobs = _joined([part.logprobs.ravel() for part in parts], np.float32)
    kept = np.isfinite(logprobs)
    ends = _bounds([part.ids.shape[1] for part in parts for _ in range(len(part.tail))])
    per_row, per_distribution = _bounds([len(row) for row in rows]), _bounds(kept)[ends]
    surprisal = np.clip(np.rint(-STEPS * logprobs[kept]), 0, MOST).astype(np.uint16)
    columns = {
        "ids": pa.ListArray.from_arrays(per_distribution, pa.array(ids[kept])),
        "surprisal": pa.ListArray.from_arrays(per_distribution, pa.array(surprisal)),
        "tail": pa.array(_joined([part.tail for part in parts], np.float32)),
        "drafted": pa.array(_joined([part.drafted_or_nan for part in parts], np.float32)),
    }
    if distribution == "p":
        columns["log_norm"] = pa.array(_joined([part.log_norms for part in parts], np.float32))
    return {
        f"{distribution}_{part}": pa.ListArray.from_arrays(per_row, values)
        for part, values in columns.items()
    }


def _tap_arrays(taps: Sequence[RecordedTaps | None]) -> dict[str, pa.Array]:
    columns = {
        "taps": [one and np.ascontiguousarray(one.values, dtype=_BITS).tobytes() for one in taps],
        "taps_begin": [one and one.begin for one in taps],
        "taps_width": [one and one.values.shape[1] for one in taps],
        "taps_layers": [one and list(one.layers) for one in taps],
    }
    return {name: pa.array(values, _TAPS[name]) for name, values in columns.items()}


def _taps(table: pa.Table) -> list[RecordedTaps | None]:
    """Hidden states of all rows; None where they were not read."""
    if "taps" not in table.column_names:
        return [None] * table.num_rows
    columns = (table[name].to_pylist() for name in _TAPS)
    return [
        None
        if values is None
        else RecordedTaps(tuple(layers), begin, np.frombuffer(values, _BITS).reshape(-1, width))
        for values, begin, width, layers in zip(*columns, strict=True)
    ]


def _joined(parts: Sequence[np.ndarray], kind: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=kind), *parts]).astype(kind, copy=False)


def _bounds(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """[n + 1] offsets of n lists among the values of all."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)]).astype(np.int32)


def from_table(table: pa.Table) -> list[RoundRecord]:
    """Records of a table. Raises `ValueError` on another schema."""
    missing = [
        name for name in SCHEMA.names if name not in table.column_names and name not in _TAPS
    ]
    if missing:
        raise ValueError(f"lacks column {missing[0]!r}")
    if others := set(table["schema"].to_pylist()) - {SCHEMA_VERSION}:
        raise ValueError(f"holds records of schema {max(others)}, this is {SCHEMA_VERSION}")
    columns = {name: table[name].to_pylist() for name in _SCALARS}
    columns |= {
        distribution: _distributions(table, distribution) for distribution in _DISTRIBUTIONS
    }
    columns["taps"] = _taps(table)
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    return [RoundRecord(**row) for row in rows]


def _distributions(table: pa.Table, distribution: str) -> list[Distributions]:
    """Distributions of all rows, as parts of the same arrays."""
    ids, tails = (
        table[f"{distribution}_ids"].combine_chunks(),
        table[f"{distribution}_tail"].combine_chunks(),
    )
    rows, per_distribution = _offsets(ids), _offsets(ids.flatten())
    widths = np.diff(per_distribution)
    # [n, k] where a distribution has a token
    place = np.arange(int(widths.max(initial=0))) < widths[:, None]
    wide_ids = np.zeros(place.shape, dtype=np.int32)
    wide_ids[place] = ids.flatten().flatten().to_numpy(zero_copy_only=False)
    logprobs = np.full(place.shape, -np.inf, dtype=np.float32)
    logprobs[place] = _logprobs(table, distribution)
    tail = tails.flatten().to_numpy(zero_copy_only=False)
    drafted = table[f"{distribution}_drafted"].combine_chunks().flatten()
    log_norms = np.zeros(len(tail), dtype=np.float32)
    if distribution == "p":
        stored = table["p_log_norm"].combine_chunks().flatten()
        log_norms = stored.to_numpy(zero_copy_only=False)
    arrays = ProbArrays(wide_ids, logprobs, tail, log_norms, drafted.to_numpy(zero_copy_only=False))
    return [Distributions(arrays, begin, end) for begin, end in itertools.pairwise(rows.tolist())]


def _logprobs(table: pa.Table, distribution: str) -> np.ndarray:
    steps = table[f"{distribution}_surprisal"].combine_chunks().flatten().flatten()
    return steps.to_numpy(zero_copy_only=False).astype(np.float32) / -STEPS


def _offsets(lists: pa.ListArray) -> np.ndarray:
    """[n + 1] offsets of each list among the flattened values."""
    offsets = lists.offsets.to_numpy()
    return offsets - offsets[0]


def without_distributions(record: RoundRecord) -> RoundRecord:
    """Copy for the reservoir: training recomputes the target's distributions and states, and only
    the gate needs the logged ones."""
    return dataclasses.replace(record, p=NOTHING, q=NOTHING, taps=None)


def without_q(record: RoundRecord) -> RoundRecord:
    """Copy for the reservoir where training reads what is logged of the target."""
    return dataclasses.replace(record, p=record.p.copied(), q=NOTHING)


def of_earlier_weights(record: RoundRecord, *, weight_version: str) -> RoundRecord:
    """Copy of a record of weights that the target had before: its tokens stay, its distributions do
    not. Its revision is never that of the weights at hand, whose name is `weight_version`."""
    kept = tokens_only(record)
    if not weight_version or record.weight_version in ("", weight_version):
        return kept
    name = f"{record.target_revision}@{record.weight_version}"
    return dataclasses.replace(kept, target_revision=name, weight_version="")


def is_of_weights(record: RoundRecord, *, revision: str, weight_version: str) -> bool:
    """True for records of the weights at hand, as far as they name any. An engine whose weights
    change in place may go on to name the revision that it began with: its version decides."""
    if weight_version and record.weight_version:
        return record.weight_version == weight_version
    return record.target_revision in ("", revision)


def tokens_only(record: RoundRecord) -> RoundRecord:
    """Copy without values in its distributions, and without states. Its positions may be scored all
    the same, with this target's own distributions."""
    p = Distributions.unlogged(len(record.p))
    return dataclasses.replace(record, p=p, q=NOTHING, taps=None)
