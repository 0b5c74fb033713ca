"""Files of records that are saved again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from draftsmith.distill.buffer import record_table
from draftsmith.distill.buffer.record_table import RecordFiles
from draftsmith.record import RoundRecord
from tests.round_records import round_record


def records_of(*names: str) -> list[RoundRecord]:
    return [round_record(request=name, drafted=[2], accepted=1, committed=[2, 3]) for name in names]


def test_records_that_were_saved_before_are_copied_and_others_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, known, written = RecordFiles(), records_of("a", "b"), []
    to_table = record_table.to_table
    monkeypatch.setattr(
        record_table, "to_table", lambda records: written.append(len(records)) or to_table(records)
    )

    def save(number: int, records: list[RoundRecord]) -> list[str]:
        folder = tmp_path / str(number)
        folder.mkdir()
        files.write(folder, "window.parquet", records)
        files.written(folder)
        table = pq.read_table(folder / "window.parquet")
        return [one.request for one in record_table.from_table(table)]

    assert save(0, known) == save(1, list(known)) == ["a", "b"] and written == [2]
    assert save(2, records_of("a", "c")) == ["a", "c"] and written == [2, 2]
    assert save(3, known[:1]) == ["a"] and written == [2, 2, 1]
    # The folder before was lost.
    (tmp_path / "3" / "window.parquet").unlink()
    assert save(4, known[:1]) == ["a"] and written == [2, 2, 1, 1]
    # Changed since.
    shutil.copyfile(tmp_path / "2" / "window.parquet", tmp_path / "4" / "window.parquet")
    assert save(5, known[:1]) == ["a"] and written == [2, 2, 1, 1, 1]
    assert save(6, known[:1]) == ["a"] and written == [2, 2, 1, 1, 1]
    files.release()
    assert save(7, known[:1]) == ["a"] and written == [2, 2, 1, 1, 1, 1]


def test_a_state_that_did_not_come_into_place_is_not_copied_from(tmp_path: Path) -> None:
    files, known = RecordFiles(), records_of("a")
    files.write(tmp_path, "window.parquet", known)
    (tmp_path / "window.parquet").write_bytes(b"half")
    files.write(tmp_path, "window.parquet", known)
    assert len(pq.read_table(tmp_path / "window.parquet")) == 1
