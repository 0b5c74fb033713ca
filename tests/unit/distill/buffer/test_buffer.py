"""The traffic buffer: records come back as they were put, once; damage, kills and full disks cost
only what they hit."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from draftsmith.distill.buffer import buffer as buffer_module
from draftsmith.distill.buffer import record_table
from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
from draftsmith.distill.buffer.folder import ShardFolder, parse, retain
from draftsmith.errors import UserError
from draftsmith.record import NOTHING, RecordedTaps, RoundRecord
from tests.round_records import Distribution, each, file_of, logged, round_record
from tests.waiting import wait_until


def distribution(first: int, width: int = 3) -> Distribution:
    share = 0.9 / width
    return Distribution(list(range(first, first + width)), [math.log(share)] * width, 0.1)


def record(request: str = "r", number: int = 0, **changes: object) -> RoundRecord:
    values: dict = {
        "request": request,
        "round": number,
        "draft_version": "v000001",
        "time_s": 100.0 + number,
        "position": 2 + 3 * number,
        "context": [5, 6] if number == 0 else [],
        "drafted": [7, 8, 9],
        "accepted": 2,
        "committed": [7, 8, 4],
        "p": logged(distribution(7), distribution(8), distribution(9)),
        "q": logged(distribution(6), distribution(7, 2), distribution(8, 1)),
    }
    return round_record(**{**values, **changes})


def test_written_records_are_read_once_and_open_as_a_dataset(tmp_path: Path) -> None:
    writer = BufferWriter(str(tmp_path), flush_s=0.05)
    for number in range(5):
        writer.put(record(number=number))
    writer.close()
    reader = BufferReader(str(tmp_path))
    reading = reader.read()
    assert [one.round for one in reading.records] == list(range(5))
    assert reader.read().records == [] and writer.dropped == 0 and writer.written == 5
    assert BufferReader(str(tmp_path), reader.cursor).read().records == []
    opened = datasets.load_dataset(
        "parquet",
        data_files=str(tmp_path / "*.parquet"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert opened.num_rows == 5 and opened[2]["p_ids"][0] == [7, 8, 9]


def test_a_shard_of_an_object_store_is_closed_by_size_or_much_later(tmp_path: Path) -> None:
    """Each is a request that is paid for."""
    here, there = BufferWriter(str(tmp_path)), BufferWriter("memory://paced-test")
    for writer in (here, there):
        writer.put(record())
    wait_until(here.folder.shards, 10.0)
    here.put(record(number=1))
    wait_until(lambda: len(here.folder.shards()) == 2, 10.0)
    assert there.folder.shards() == []
    for number in range(1, there.flush_records):
        there.put(record(number=number))
    wait_until(there.folder.shards, 10.0)
    for writer in (here, there):
        writer.close()
    assert there.written == there.flush_records and len(there.folder.shards()) == 1
    fsspec.filesystem("memory").rm("/paced-test", recursive=True)


def test_an_object_store_that_is_not_reached_is_waited_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With an error of its own library, which is no `OSError`."""

    def unreachable(*args: object, **values: object) -> None:
        raise RuntimeError("could not connect to the endpoint")

    store = fsspec.filesystem("memory")
    monkeypatch.setattr(type(store), "pipe_file", unreachable)
    monkeypatch.setattr(type(store), "ls", unreachable)
    writer = BufferWriter("memory://unreachable-test", flush_s=0.01)
    writer.put(record())
    wait_until(lambda: caplog.records, 10.0)
    assert [
        line.message.count("cannot be written (RuntimeError: could not connect")
        for line in caplog.records
    ] == [1]
    with pytest.raises(OSError):
        BufferReader("memory://unreachable-test").read()
    monkeypatch.undo()
    writer.close()
    assert (writer.written, writer.dropped) == (1, 0)
    assert len(BufferReader("memory://unreachable-test").read().records) == 1
    store.rm("/unreachable-test", recursive=True)


def test_states_beyond_their_bound_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that refuses costs memory up to the bound, then states, then requests."""

    def refuse(self: ShardFolder, name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardFolder, "put", refuse)
    values = np.zeros((4, 8), dtype=np.uint16)
    monkeypatch.setattr(buffer_module, "MAX_TAP_BYTES", 3 * values.nbytes)
    writer = BufferWriter(str(tmp_path), flush_s=0.01)
    assert writer.share == 1.0
    for number in range(5):
        writer.put(record(number=number, taps=RecordedTaps((1,), 4 * number, values)))
    assert (writer.untapped, writer.dropped, writer.share) == (2, 0, 0.0)
    monkeypatch.undo()
    writer.close()
    assert writer._tap_bytes == 0
    read = BufferReader(str(tmp_path), with_taps=True).read().records
    assert [one.tap_bytes for one in read] == [64, 64, 64, 0, 0]


def test_record_that_arrow_refuses_costs_only_itself(tmp_path: Path) -> None:
    writer = BufferWriter(str(tmp_path), flush_s=5.0)
    writer.put(record(number=0))
    writer.put(record(number=1, drafted=[2**40]))
    writer.put(record(number=2))
    writer.close()
    assert [one.round for one in BufferReader(str(tmp_path)).read().records] == [0, 2]
    assert (writer.written, writer.dropped) == (2, 1)


@pytest.mark.parametrize("damage", ["truncate", "garbage", "empty", "other columns"])
def test_damaged_shard_is_skipped_with_one_line(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        writer = BufferWriter(str(tmp_path), flush_s=5.0)
        writer.put(record(number=number))
        writer.close()
        time.sleep(0.002)
    victim = Path(ShardFolder(str(tmp_path)).shards()[1].path)
    match damage:
        case "truncate":
            victim.write_bytes(victim.read_bytes()[:-200])
        case "garbage":
            victim.write_bytes(b"PAR1" + bytes(500) + b"PAR1")
        case "empty":
            victim.write_bytes(b"")
        case "other columns":
            buffer_module.record_table.pq.write_table(buffer_module.pa.table({"x": [1]}), victim)
    reader = BufferReader(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        reading = reader.read()
    assert [one.round for one in reading.records] == [0, 2] and reading.damaged == 1
    assert len([line for line in caplog.records if "damaged" in line.message]) == 1
    assert reader.read().damaged == 0


def test_a_flipped_bit_of_a_page_costs_its_shard() -> None:
    """Or is where nothing is told. The headers of pages have no checksum of their own."""
    data = file_of([record()])
    pages = len(data) - 8 - int.from_bytes(data[-8:-4], "little")

    def told(one: RoundRecord) -> list[object]:
        return [dataclasses.replace(one, p=NOTHING, q=NOTHING), *each(one.p), *each(one.q)]

    def num_changed(read: Callable[[bytes], list[RoundRecord]]) -> int:
        changed = 0
        for at in range(4, pages, 19):
            flipped = bytearray(data)
            flipped[at] ^= 1
            with contextlib.suppress(ValueError, OSError):
                changed += told(read(bytes(flipped))[0]) != told(parse(data)[0])
        return changed

    unverified = num_changed(lambda held: record_table.from_table(pq.read_table(io.BytesIO(held))))
    assert num_changed(parse) <= unverified / 10


def test_failing_file_system_is_waited_out_and_a_hopeless_shard_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = BufferWriter(str(tmp_path), flush_s=5.0, flush_records=1)
    for number in range(3):
        writer.put(record(number=number))
    writer.close()
    reader, read = BufferReader(str(tmp_path)), ShardFolder.read
    second = ShardFolder(str(tmp_path)).shards()[1]

    def read_but_second(self: ShardFolder, name: str) -> bytes:
        if name == second.name:
            raise OSError(5, "Input/output error")
        return read(self, name)

    monkeypatch.setattr(ShardFolder, "read", read_but_second)
    reading = reader.read()
    assert [one.round for one in reading.records] == [0] and reading.more and reading.damaged == 0
    monkeypatch.setattr(ShardFolder, "read", read)
    assert [one.round for one in reader.read().records] == [1, 2]
    monkeypatch.setattr(ShardFolder, "read", read_but_second)
    stubborn = BufferReader(str(tmp_path))
    found = [
        one.round for _ in range(buffer_module.MAX_FAILURES) for one in stubborn.read().records
    ]
    assert found == [0, 2] and stubborn.damaged == 1


def test_limit_reads_whole_shards_and_says_that_more_is_left(tmp_path: Path) -> None:
    writer = BufferWriter(str(tmp_path), flush_s=5.0, flush_records=4)
    for number in range(12):
        writer.put(record(number=number))
    writer.close()
    reader = BufferReader(str(tmp_path))
    first = reader.read(max_records=5)
    assert len(first.records) == 8 and first.more
    second = reader.read(max_records=5)
    assert len(second.records) == 4 and not second.more


def test_a_clock_set_back_costs_a_reader_that_is_behind_nothing(tmp_path: Path) -> None:
    folder = ShardFolder(str(tmp_path))
    for number, time_ms in enumerate((2 * 10**12, 10**12, 10**12 + 500)):
        name = f"{time_ms:013d}-a-{number:08d}.parquet"
        folder.put(name, file_of([record(f"r{number}")]))
    reader = BufferReader(str(tmp_path))
    assert [one.request for _ in range(3) for one in reader.read(max_records=1).records] == [
        "r0",
        "r1",
        "r2",
    ]


def test_retention_takes_read_shards_first_and_unread_only_for_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = BufferWriter(str(tmp_path), flush_s=5.0, flush_records=1)
    for number in range(6):
        writer.put(record(number=number))
    writer.close()
    folder = ShardFolder(str(tmp_path))
    present = folder.shards()
    cursor = {writer.writer: 2}
    assert retain(folder, cursor, max_bytes=1 << 30, max_age_s=3600) == []
    aged = retain(folder, cursor, max_bytes=1 << 30, max_age_s=-1)
    assert [shard.number for shard in aged] == [0, 1, 2] and not caplog.records
    squeezed = retain(folder, cursor, max_bytes=present[-1].bytes + 1, max_age_s=3600)
    assert [shard.number for shard in squeezed] == [3, 4]
    assert "2 shards were deleted unread" in caplog.text
    reader = BufferReader(str(tmp_path), cursor)
    assert [one.round for one in reader.read().records] == [5]


def test_records_of_seeded_requests_reach_no_reader(tmp_path: Path) -> None:
    """Whichever server wrote them: this one's recorder makes none."""
    folder = ShardFolder(str(tmp_path))
    mixed = [record("seeded", 0, seeded=True), record("plain", 0), record("seeded", 1, seeded=True)]
    folder.put(f"{0:013d}-other-{0:08d}.parquet", file_of(mixed))
    reading = BufferReader(str(tmp_path)).read()
    assert [one.request for one in reading.records] == ["plain"] and reading.seeded == 2
    assert len(parse(folder.read(folder.shards()[0].name))) == 3, "they are in the shard"


def test_cursor_forgets_writers_whose_shards_are_gone(tmp_path: Path) -> None:
    writer = BufferWriter(str(tmp_path), flush_s=5.0)
    writer.put(record())
    writer.close()
    reader = BufferReader(str(tmp_path), {"gone": 7})
    reader.read()
    reader.forget_gone_writers()
    assert reader.cursor == {writer.writer: 0}


def test_unknown_protocol_is_one_sentence() -> None:
    with pytest.raises(UserError, match="nowhere://x"):
        BufferWriter("nowhere://x")
