"""Files of prompts as people have them, in every format and encoding."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.errors import UserError
from draftsmith.prompts.sources import read_rows

# Ends of lines to str.splitlines, and none to JSON or an editor.
NO_ENDS = "\u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e"
WORDS = ["one", f"two {NO_ENDS} end", "dr\u00e4i \U0001f600", '"quoted", with; marks\tand\nlines']
ROWS = [{"prompt": word} for word in WORDS]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
ARRAY = json.dumps(ROWS, ensure_ascii=False)
PRETTY = json.dumps(ROWS, indent=4)


def read(path: Path, **options: str) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(str(path), **options)]


def refusal(path: Path, **options: str) -> str:
    with pytest.raises(UserError) as raised:
        read(path, **options)
    return str(raised.value)


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.jsonlines", "A.JSONL", "a.json", "a", "a.txt", "a.data"]
)
@pytest.mark.parametrize("text", [LINES, LINES + "\n\n", "\n\n" + LINES, LINES.replace("\n", "\r\n"), ARRAY, PRETTY,
                                  "\n".join(json.dumps(row, indent=2) for row in ROWS),
                                  json.dumps({"version": 1, "data": ROWS}), json.dumps({"rows": ROWS}, indent=1)])  # fmt: skip
def test_json_is_read_under_any_suffix(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert read(tmp_path / name) == ROWS


@pytest.mark.parametrize("text", [LINES, PRETTY])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_an_encoding_that_names_itself_is_read(encoding: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(text.encode(encoding))
    assert read(tmp_path / "a.jsonl") == ROWS


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.zst", "a.bin"])
@pytest.mark.parametrize("pack", [gzip.compress, zstd, bz2.compress, lzma.compress])
def test_packed_files_are_known_by_their_first_bytes(name: str, pack: Any, tmp_path: Path) -> None:
    half = len(LINES) // 2
    (tmp_path / name).write_bytes(pack(LINES[:half].encode()) + pack(LINES[half:].encode()))
    assert read(tmp_path / name) == ROWS


@pytest.mark.parametrize("pack", [gzip.compress, zstd, bz2.compress, lzma.compress])
def test_a_packed_file_that_ends_too_early_is_refused(pack: Any, tmp_path: Path) -> None:
    text = "".join(json.dumps({"prompt": str(hash(str(n)))}) + "\n" for n in range(20000))
    data = pack(text.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(data[: len(data) // 2])
    assert "a.jsonl.gz' cannot be read (" in refusal(tmp_path / "a.jsonl.gz")


def test_tables_are_read_by_the_names_of_their_columns(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "no-suffix").write_bytes((tmp_path / "a.parquet").read_bytes())
    assert read(tmp_path / "a.parquet") == read(tmp_path / "no-suffix") == ROWS
    for name, mark in (("a.csv", ","), ("b.csv", ";"), ("a.tsv", "\t"), ("A.CSV", ",")):
        cells = [
            f"{number}{mark}" + '"' + word.replace('"', '""') + '"'
            for number, word in enumerate(WORDS)
        ]
        text = "\r\n".join([f"id{mark} Prompt", *cells])
        (tmp_path / name).write_bytes(text.encode("utf-8-sig"))
        assert read(tmp_path / name) == ROWS
    (tmp_path / "a.csv.gz").write_bytes(
        gzip.compress(b"instruction,input,output\nAdd.,1 2,3\nSing.,,La.\n")
    )
    assert read(tmp_path / "a.csv.gz") == [
        {"prompt": "Add.\n\n1 2", "completion": "3"},
        {"prompt": "Sing.", "completion": "La."},
    ]  # fmt: skip
    long = "x" * 200_000
    (tmp_path / "long.csv").write_text(f"text\n{long}\n")
    assert read(tmp_path / "long.csv") == [{"text": long}]


def test_fields_that_only_other_rows_of_a_table_have_are_dropped(tmp_path: Path) -> None:
    def row(name: str) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "f", "parameters": {name: "string"}}}
        return {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}

    rows = [row("city"), row("query")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == rows
    dated = pa.table({"prompt": ["x"], "at": pa.array([2**62], pa.timestamp("us"))})
    pq.write_table(dated, tmp_path / "dated.parquet")
    assert "date value out of range); mend it" in refusal(tmp_path / "dated.parquet")
    # A null of JSON was written there.
    rows[0]["tools"][0]["function"]["default"] = None
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read(tmp_path / "a.jsonl") == rows


def test_lines_of_plain_text_end_where_an_editor_ends_them(tmp_path: Path) -> None:
    lines = [f"one {NO_ENDS} end", "  two", "[Verse 1] sing", "{name}, sing"]
    rows = [{"prompt": line, "text": line} for line in lines]
    for name, end in (("a.txt", "\n"), ("a.md", "\r\n"), ("a.TXT", "\r")):
        (tmp_path / name).write_bytes((end * 2).join(lines).encode("utf-8-sig"))
        assert read(tmp_path / name) == rows
    (tmp_path / "a.txt").write_bytes("\n".join(lines).encode("utf-16"))
    assert read(tmp_path / "a.txt") == rows


@pytest.mark.parametrize("first", [
    "[[Category]] what is this?", '{"a": 1, is this JSON?', '["what" is that', '["a"] is what?', "[", "{",
])  # fmt: skip
def test_plain_text_may_begin_like_json(first: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{first}\nsecond line\n")
    assert [row["prompt"] for row in read(tmp_path / "a.txt")] == [first, "second line"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"prompt": "x"}\n\n{"prompt": ', "line 3 of "),
        ("a.ndjson", '{"prompt": "x"}\n{"prompt": "a\n', "line 2 of "),
        ("a", "hello\nworld\n", "name the file .txt"),
        ("a.txt", '{"prompt": "x"}\nhello\n', "line 2 of "),
        ("a.txt", 'hello\n{"prompt": "x"}\n', "line 2 of "),
        ("a.json", '[{"prompt": "x"},\n {"prompt": "y"}\n {"prompt": "z"}]', "line 3 of "),
        ("a.json", '[{"prompt": "x"},\n {"prompt": "y"', "is not valid JSON"),
        ("a.json", '[{"prompt": "x"},\n\n {"prompt": "y}]', "line 3 of "),
        ("a.jsonl", "[" * 100_000, "line 1 of "),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": ' + "[" * 100_000, "line 2 of "),
        ("a.jsonl", '{"prompt": "x"}\n' + '{"n": ' + "1" * 5000 + "}", "line 2 of "),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": "half \\ud83d"}', r"line 2 of 'a.jsonl' holds \ud83d"),
        ("a.jsonl", '{"prompt": "x"}\n{"body": "y", "n": 1}', "line 2 of 'a.jsonl' holds body (a text), n (a number)"),
        ("a.json", '[{"prompt": "x"}, 3]', "row 2 of 'a.json' holds a number"),
        ("a.csv", "prompt\nhello, world\n", "row 1 of 'a.csv' has more cells"),
        ("a.csv", 'prompt\n"a\n', "mend its quotes"),
        ("a.csv", "hello\nworld\n", "row 1 of 'a.csv' holds hello (a text)"),
        ("a.parquet", "PAR1", "is no whole Parquet file"),
        ("a.zip", "PK\x03\x04", "is a zip archive; unpack it"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place(
    name: str, content: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    found = refusal(Path(name))
    assert says in found and repr(name) in found and "; " in found and len(found) < 400


@pytest.mark.parametrize(
    ("name", "before", "after", "place"),
    [
        ("a.txt", b"one\ncaf", b"\n", "line 2 of"),
        ("a.jsonl", b'{"prompt": "one"}\n{"prompt": "caf', b'"}\n', "line 2 of"),
        ("a.json", b'[{"prompt": "one"},\n{"prompt": "caf', b'"}\n]', "row 2 of"),
        ("a.csv", b"prompt\none\ncaf", b"\n", "row 2 of"),
    ],
)
def test_latin_1_is_refused_with_the_row_that_has_it(
    name: str, before: bytes, after: bytes, place: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(before + "\u00e9".encode("latin-1") + after)
    found = refusal(tmp_path / name)
    assert place in found and "holds the byte 0xe9, which is not UTF-8; save the file as" in found


def test_folders_are_read_by_their_files(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "a.ndjson.gz").write_bytes(gzip.compress(b'{"prompt": "one"}'))
    (mixed / "b.JSONL").write_text('{"prompt": "two"}')
    (mixed / "c.csv").write_text("prompt\nthree\n")
    (mixed / "README.md").write_text("# Words")
    (mixed / "LICENSE").write_text("Take them.")
    (mixed / "requirements.txt").write_text("numpy")
    (mixed / "dataset_infos.json").write_text("{}")
    assert read(mixed) == [{"prompt": word} for word in ("one", "two", "three")]

    named = tmp_path / "named" / "data"
    named.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(ROWS), named / "train-00000-of-00001.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[:1]), named / "test-00000-of-00001.parquet")
    assert read(named.parent) == ROWS and read(named.parent, split="test") == ROWS[:1]
    assert "for split 'validation' but test, train" in refusal(named.parent, split="validation")

    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("one\ntwo\n")
    assert [row["prompt"] for row in read(texts)] == ["one", "two"]

    configs = tmp_path / "configs"
    for config in ("main", "socratic"):
        (configs / config).mkdir(parents=True)
        (configs / config / "train.jsonl").write_text(LINES)
    assert "('main', 'socratic'); give one of them" in refusal(configs)
    (tmp_path / "empty").mkdir()
    assert "has no file of prompts; give a file" in refusal(tmp_path / "empty")


def test_data_sets_on_disk_are_read_with_or_without_splits(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(str(tmp_path / "parts"))
    assert read(tmp_path / "one") == read(tmp_path / "parts") == ROWS
    assert read(tmp_path / "parts", split="test") == ROWS[:1]
    assert "are no file and no data set that loads" in refusal(tmp_path / "parts", split="dev")
    beside = rows.add_column("picture", [{"bytes": b"none", "path": None}] * len(rows))
    beside.cast_column("picture", datasets.Image()).save_to_disk(str(tmp_path / "pictures"))
    assert read(tmp_path / "pictures") == ROWS


def test_a_pipe_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    code = "import sys; from draftsmith.prompts.sources import *\nprint(sum(1 for _ in read_rows(sys.argv[1])))"
    command = f"'{sys.executable}' -c '{code}' <(zcat a.jsonl.gz)"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{len(ROWS)}\n", done.stderr


@pytest.mark.parametrize("is_array", [False, True])
def test_a_large_file_is_not_held_in_memory(is_array: bool, tmp_path: Path) -> None:
    """20 MB, on one line as an array, packed."""
    row, end = json.dumps({"prompt": "x" * 10_000}).encode(), b"," if is_array else b"\n"
    with gzip.open(tmp_path / "a.json.gz", "wb", compresslevel=1) as file:
        file.write(b"[" if is_array else b"")
        file.writelines([row + end] * 1999)
        file.write(row + (b"]" if is_array else b""))
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_rows(str(tmp_path / "a.json.gz"))) == 2000
        assert tracemalloc.get_traced_memory()[1] < 12_000_000
    finally:
        tracemalloc.stop()


def test_a_text_in_place_of_a_path_is_refused() -> None:
    text = "Write a long story about a fox. " * 20
    with pytest.raises(UserError, match="no file and no data set"):
        next(iter(read_rows(text)))
