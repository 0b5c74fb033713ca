"""What a buffer does beside storing: fewer requests for readers that are behind, forgetting, and no
wait for its disk."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from draftsmith.distill.buffer import buffer as buffer_module
from draftsmith.distill.buffer import folder as folder_module
from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
from draftsmith.distill.buffer.folder import (
    GONE_S,
    PROGRESS,
    ShardFolder,
    forget,
    forgotten,
    leave_progress,
    run,
    sweep_progress,
    unread_bytes,
)
from draftsmith.distill.buffer.traffic import OpenRequests
from draftsmith.distill.config import ForgetConfig
from draftsmith.errors import UserError
from draftsmith.record import RoundRecord, hashed, hashed_answer
from tests.round_records import Distribution, logged
from tests.waiting import wait_until

BASE = RoundRecord(
    hashed("cmpl-a-0"), round=0, target="t", target_revision="rev", draft_version="1",
    time_s=1.0, position=2, context=[5, 6], drafted=[7], accepted=1, committed=[7, 8],
    emitted=8, p=logged(Distribution([7, 9], [-0.1, -3.0], 0.05)), q=logged(Distribution([7], [0.0], 0.0)),
)  # fmt: skip


def fill(writer: BufferWriter, count: int, answer: str = "cmpl-a") -> None:
    for number in range(count):
        writer.put(replace(BASE, request=hashed(f"{answer}-{number}")))


@pytest.mark.parametrize("url", ["memory://backlog-test", "folder"])
def test_fewer_requests_are_asked_for_while_the_reader_is_behind(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_module, "LOOK_S", 0.0)
    url = str(tmp_path) if url == "folder" else url
    writer = BufferWriter(url, flush_s=0.01, backlog_bytes=1000, share=0.5)
    fill(writer, 200)
    wait_until(lambda: writer.written == 200, 10.0)
    assert writer.share == 0.5, "nobody reads: retention alone bounds it"
    reader = BufferReader(url)
    leave_progress(reader.folder, reader.name, {})
    wait_until(lambda: writer.share < 0.5, 10.0)
    assert writer.share == pytest.approx(
        0.5 * 1000 / unread_bytes(reader.folder, reader.folder.names())
    )
    assert len(reader.read(max_records=10**6).records) == 200
    wait_until(lambda: writer.share == 0.5, 10.0)
    stale = time.time() + 2 * GONE_S
    monkeypatch.setattr(folder_module.time, "time", lambda: stale)
    sweep_progress(reader.folder)
    assert not any(PROGRESS.fullmatch(name) for name in reader.folder.names())
    monkeypatch.undo()
    writer.close()
    if url.startswith("memory"):
        fsspec.filesystem("memory").rm("/backlog-test", recursive=True)


def test_a_disk_that_hangs_is_nobodys_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung, write = threading.Event(), ShardFolder.put

    def hang(self: ShardFolder, name: str, data: bytes) -> None:
        hung.wait(30)
        write(self, name, data)

    monkeypatch.setattr(ShardFolder, "put", hang)
    monkeypatch.setattr(buffer_module, "CLOSE_S", 0.2)
    writer = BufferWriter(str(tmp_path), flush_s=0.01, flush_records=10, queue_records=100)
    slowest_s = 0.0
    for number in range(300):
        begun_s = time.perf_counter()
        assert writer.share in (0.0, 1.0)
        writer.put(replace(BASE, round=number))
        slowest_s = max(slowest_s, time.perf_counter() - begun_s)
    # A put that waited for the disk would take 30 s; a loaded machine may take a thread's turn away
    # for a moment.
    assert slowest_s < 2.0 and writer.share == 0.0, (
        "a queue that fills leaves its room to requests that are recorded already"
    )
    assert writer.dropped == 200
    begun_s = time.monotonic()
    writer.close()
    assert time.monotonic() - begun_s < 5.0
    hung.set()
    wait_until(lambda: writer.written == 100, 10.0)


def test_an_answer_is_forgotten_by_the_buffer_its_writers_and_its_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_module, "LOOK_S", 0.0)
    writer = BufferWriter(str(tmp_path), flush_s=0.01)
    fill(writer, 3), fill(writer, 2, "cmpl-b")
    wait_until(lambda: writer.written == 5, 10.0)
    reader, late = BufferReader(str(tmp_path)), BufferReader(str(tmp_path))
    open_requests = OpenRequests(reader.read().records)
    folder = ShardFolder(str(tmp_path))
    assert forget(folder, "cmpl-a", settle_s=0.0) == 3
    fill(writer, 3), fill(writer, 1, "cmpl-b")
    wait_until(lambda: len(writer._queue) == 0, 10.0)
    writer.close()
    assert {one.request for one in late.read().records} == {hashed("cmpl-b-0"), hashed("cmpl-b-1")}
    stored = b"".join(folder.read(shard.name) for shard in folder.shards())
    assert (
        hashed_answer("cmpl-b").encode() in stored
        and hashed_answer("cmpl-a").encode() not in stored
    )
    open_requests.forget(reader.read().forgotten)
    assert sorted(open_requests.records) == [hashed("cmpl-b-0"), hashed("cmpl-b-1")]


def test_forget_names_a_buffer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="serve --learn"):
        run(ForgetConfig(buffer=str(tmp_path / "none"), request="cmpl-a"))


def test_forget_refuses_an_answer_that_the_buffer_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder_module, "SETTLE_S", 0.0)
    writer = BufferWriter(str(tmp_path), flush_s=0.01)
    fill(writer, 3)
    writer.close()
    with pytest.raises(UserError, match="no record of 'cmpl-z' is in buffer"):
        run(ForgetConfig(buffer=str(tmp_path), request="cmpl-z"))
    assert run(ForgetConfig(buffer=str(tmp_path), request="cmpl-a")) == 0
    assert capsys.readouterr().out.startswith("3 records of cmpl-a were deleted")
    for answer in ("cmpl-z", "cmpl-a"):  # marked without a record, and deleted before
        with pytest.raises(UserError, match=r"it is marked, .* unless .* deleted before"):
            run(ForgetConfig(buffer=str(tmp_path), request=answer))
        assert hashed_answer(answer) in forgotten(ShardFolder(str(tmp_path)).names())


def test_a_last_record_ends_its_request_at_once() -> None:
    first, last = (
        BASE,
        replace(
            BASE, round=1, position=4, context=[], drafted=[], accepted=0, committed=[], last=True
        ),
    )
    requests = OpenRequests([last])
    assert requests.take(idle_s=60) == [], "what came before it is still on its way"
    requests.add([first])
    (text,) = requests.take(idle_s=60)
    assert text.tokens == [5, 6, 7, 8]
