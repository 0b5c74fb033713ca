"""Rows of a file, a folder of files, or a data set of the `datasets` library, one after the other
and never as a whole."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from draftsmith.chats import without_nulls
from draftsmith.errors import UserError, first_line
from draftsmith.prompts.corpus import CORPORA
from draftsmith.prompts.encoded import SUFFIXES, check_characters, open_text
from draftsmith.prompts.json_values import Placed, begins_json, read_values
from draftsmith.prompts.shapes import NAMES, Row, normalised

PLAIN = (".txt", ".text", ".md")
TABLES = (".csv", ".tsv")
PARQUET = (".parquet", ".pq")
JSON = (".json", ".jsonl", ".ndjson", ".jsonlines", ".jl")
# Records beside the data of a data set.
IGNORED = ("config.json", "dataset_info.json", "dataset_infos.json", "provenance.json")
HEAD = 1 << 16  # characters by which a file is known
LOOKS_LIKE_JSON = re.compile(r'\s*(\{\s*("|$)|\[\s*(\{|\[|"|$))')
SPLITS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
MOST_OF_A_CELL = 2**31 - 1  # characters


def read_rows(source: str, *, split: str = "train") -> Iterator[tuple[str, Row]]:
    """(where it stands, row as `normalised` gives it). Lines of plain text are both `prompt` and
    `text`.

    Args:
        split: of a data set, and of a folder whose files are named for theirs.

    Raises:
        UserError: there is no such source, or something in it cannot be understood.
    """
    path = Path(source)
    if os.path.isdir(source):
        of_datasets = ("state.json", "dataset_dict.json")
        if any((path / name).is_file() for name in of_datasets):
            placed = _normalised(_dataset(source, split))
        else:
            placed = itertools.chain.from_iterable(map(_rows_of, _files_of(path, split)))
    elif os.path.exists(source):
        placed = _rows_of(path, split)
    else:
        check_source(source)
        placed = _normalised(_dataset(source, split))
    for where, row in placed:
        check_characters(row, where)
        yield where, row


def check_source(name: str) -> None:
    """Raises a `UserError` for a path, as its form says, that nothing is at."""
    is_a_path = (
        _kind(Path(name)) in {*PLAIN, *TABLES, *PARQUET, *JSON}
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
    )
    if is_a_path and not os.path.exists(name):
        raise UserError(
            f"prompts {name!r} do not exist; give a file, a folder, a data set, "
            f"{' or '.join(CORPORA)}"
        )


def _kind(path: Path) -> str:
    """Suffix in lower case, without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((one for one in reversed(suffixes) if one not in SUFFIXES), "")


def read_file(path: Path) -> Iterator[Placed]:
    """(where it stands, value as the file has it), a line of plain text as `read_rows` gives it.

    Raises:
        UserError: there is no such file, or something in it cannot be read.
    """
    if not os.path.isfile(path):
        raise UserError(f"prompts {str(path)!r} are no file; give one")
    for where, value in _lines(path) if _is_plain(path) else _values(path, "train"):
        check_characters(value, where)
        yield where, value


def _rows_of(path: Path, split: str = "train") -> Iterator[tuple[str, Row]]:
    return _lines(path) if _is_plain(path) else _normalised(_values(path, split))


def _is_plain(path: Path) -> bool:
    return _kind(path) in PLAIN and not _begins_like_json(path)


def _values(path: Path, split: str) -> Iterator[Placed]:
    kind = _kind(path)
    if kind in TABLES:
        return _table(path, kind)
    if kind in PARQUET or (path.is_file() and _is_parquet(path)):
        return _parquet(path)
    return _json(path, split)


def _normalised(values: Iterator[Placed]) -> Iterator[tuple[str, Row]]:
    for where, value in values:
        for row in normalised(value, where):
            yield where, row


def _files_of(folder: Path, split: str) -> list[Path]:
    """Files of data in the folder, or in the only one within it that has some; those of the split
    where names give splits."""
    found = [
        path
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".") and path.name not in IGNORED and _holds_data(path)
    ]
    files = [path for path in found if path.is_file()]
    plain = [path for path in files if _kind(path) in PLAIN]
    files = [path for path in files if path not in plain] or plain
    entries = files or [path for path in found if path.is_dir()]
    splits = {path: _split_of(path.name) for path in entries}
    if any(splits.values()):
        entries = [path for path, its in splits.items() if its == split]
    if not entries:
        known = ", ".join(sorted({its for its in splits.values() if its}))
        raise UserError(
            f"folder {str(folder)!r} has no file of prompts"
            + (f" for split {split!r} but {known}" if known else "")
            + "; give a file, or a folder of JSON lines, Parquet, CSV or text"
        )
    if files:
        return entries
    if len(entries) > 1:
        names = ", ".join(repr(path.name) for path in entries)
        raise UserError(
            f"folder {str(folder)!r} has data in several folders ({names}); give one of them"
        )
    return _files_of(entries[0], split)


def _holds_data(path: Path) -> bool:
    kinds = {*JSON, *TABLES, *PARQUET, ".txt", ".text"}
    if path.is_dir():
        return any(_kind(one) in kinds for one in path.rglob("*"))
    return _kind(path) in kinds


def _split_of(name: str) -> str | None:
    """Split that a file is named for."""
    return next(
        (
            split
            for split, words in SPLITS.items()
            if re.search(rf"(?<![a-z])({words})(?![a-z])", name.lower())
        ),
        None,
    )


def _begins_like_json(path: Path) -> bool:
    with open_text(path) as text:
        head = text.read(HEAD)
    return bool(LOOKS_LIKE_JSON.match(head)) and begins_json(head, is_whole=len(head) < HEAD)


def _is_parquet(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.peek(4)[:4] == b"PAR1"


def _lines(path: Path) -> Iterator[tuple[str, Row]]:
    with open_text(path) as text:
        for number, line in enumerate(text, start=1):
            where, line = f"line {number} of {str(path)!r}", line.rstrip("\n")
            if LOOKS_LIKE_JSON.match(line) and _is_json(line):
                raise UserError(
                    f"{where} is JSON in a plain text; give JSON lines and plain text in files "
                    "apart"
                )
            if line.strip():
                yield where, {"prompt": line, "text": line}


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), (dict, list))
    except (ValueError, RecursionError):
        return False


def _json(path: Path, split: str) -> Iterator[Placed]:
    with open_text(path) as text:
        values = read_values(text, str(path))
        begin = list(itertools.islice(values, 2))
        rows = _rows_in(begin[0][1], split) if len(begin) == 1 else None
        if rows is None:
            yield from itertools.chain(begin, values)
        else:
            for number, row in enumerate(rows, start=1):
                yield f"row {number} of {str(path)!r}", row


def _rows_in(value: Any, split: str) -> list[Any] | None:
    """Rows of an object that holds them under one key, or under the name of their split; None of
    what is a row itself."""
    if not isinstance(value, dict) or NAMES & {name.lower() for name in value}:
        return None
    lists = {name: item for name, item in value.items() if isinstance(item, list)}
    return lists.get(split) or (next(iter(lists.values())) if len(lists) == 1 else None)


def _table(path: Path, kind: str) -> Iterator[Placed]:
    csv.field_size_limit(MOST_OF_A_CELL)
    with open_text(path, newline="") as text:
        head = text.readline()
        mark = "\t" if kind == ".tsv" else max(",;\t", key=head.count)
        table = csv.DictReader(itertools.chain([head], text), delimiter=mark, strict=True)
        rows = enumerate(table, start=1)
        while True:
            try:
                number, row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                raise UserError(
                    f"line {table.line_num} of {str(path)!r} is no line of a table ({error}); mend "
                    "its quotes"
                ) from error
            where = f"row {number} of {str(path)!r}"
            if None in row:
                raise UserError(
                    f"{where} has more cells than its first line has names; put cells that hold "
                    f"{mark!r} in quotes, and names of columns in the first line"
                )
            yield where, row


def _parquet(path: Path) -> Iterator[Placed]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield from _records(file.iter_batches(batch_size=256), str(path))
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().rstrip(".")
        raise UserError(f"{str(path)!r} is no whole Parquet file ({reason}); replace it") from error


def _dataset(source: str, split: str) -> Iterator[Placed]:
    import datasets

    try:
        if os.path.isdir(source):
            rows = datasets.load_from_disk(source)
            if isinstance(rows, datasets.DatasetDict):
                rows = rows[split]
        else:
            rows = datasets.load_dataset(source, split=split)
    except Exception as error:
        raise UserError(
            f"prompts {source!r} are no file and no data set that loads ({first_line(error)}); "
            "check the name and the split"
        ) from error
    # Pictures and sound beside a text stay as they are packed.
    return _records(rows.with_format("arrow").iter(256), source)


def _records(tables: Iterable[Any], source: str) -> Iterator[Placed]:
    """Rows of Arrow's tables."""
    numbers = itertools.count(1)
    for table in tables:
        try:
            rows = table.to_pylist()
        except (ValueError, OverflowError) as error:
            raise UserError(
                f"{source!r} holds a value that is no text, number or date of Python's "
                f"({first_line(error)}); mend it, or leave its column out"
            ) from error
        for row in rows:
            yield f"row {next(numbers)} of {source!r}", without_nulls(row)
