"""Records through shared memory and a writer process: the same rows as `BufferWriter` makes, and
what is left where the writer is slow, is killed, or cannot write."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith import child_process as child_module
from draftsmith.distill.buffer import process as process_module
from draftsmith.distill.buffer import process_writer
from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
from draftsmith.distill.buffer.folder import ShardFolder
from draftsmith.distill.buffer.process import ProcessWriter, WriterJob
from draftsmith.kernels.sampling.logged import LoggedRound
from draftsmith.record import (
    NOTHING,
    RecordedRound,
    RecordedTaps,
    RecordHead,
    RoundRecord,
    RoundRow,
    SinkCounts,
)
from draftsmith.shared_ring import Ring
from tests.round_records import each
from tests.waiting import wait_until

VOCAB = 300
TOKENS = [3, 4, 5]


HEAD = RecordHead(
    request="a-0", request_class="code", target="t", target_revision="r", draft_version="7",
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, share=1.0, rule="chain", engine="",
    sampler="",
)  # fmt: skip
PLAIN = RoundRow(HEAD, 0, 4, [1, 2], [], 0, [], -1, last=False, taps=None, place=-1)


def plain(number: int = 0, request: str = "a-0", **changes: Any) -> RecordedRound:
    """A record of its own, without drafted tokens."""
    head = dataclasses.replace(HEAD, request=request)
    return RecordedRound([PLAIN._replace(head=head, round=number, **changes)], 1.5)


def round_of(
    count: int, *, number: int = 0, dtype: torch.dtype = torch.float32, one_hot: bool = False,
    temperature: float = 0.7, seed: int = 0, **changes: Any,
) -> RecordedRound:  # fmt: skip
    """Records of `count` requests in one round; of each fourth row of p nothing is recorded."""
    torch.manual_seed(seed)
    p = torch.randn(4 * count, VOCAB).to(dtype)
    q = None if one_hot else torch.randn(count, 3, VOCAB)
    rows = [
        RoundRow(
            dataclasses.replace(HEAD, request=f"{'abcdefgh'[index]}-0", temperature=temperature),
            number, 4, [1, 2], TOKENS, 1, [3, 9], 9, last=False, taps=None, place=index,
        )._replace(**changes)
        for index in range(count)
    ]  # fmt: skip
    return RecordedRound(rows, 1.5 + number, LoggedRound(p, q, [TOKENS] * count))


class NoChild:
    """A ring without a process behind it."""

    def __init__(self, *_: Any, capacity: int, share: float, **__: Any):
        self.ring = Ring.create(capacity, share)
        self.gave_up = self.alive = False

    def close(self, **_: Any) -> None: ...


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ProcessWriter]:
    monkeypatch.setattr(process_module, "Child", NoChild)

    def make(capacity: int = 1 << 20, **job: Any) -> ProcessWriter:
        return ProcessWriter(WriterJob(str(tmp_path / "buffer"), **job), capacity=capacity)

    return make


def write(sink: ProcessWriter, **job: Any) -> None:
    """What the process does with all that is in the ring."""
    process_writer.run(sink.ring, WriterJob(sink.folder.root, **job), lambda seconds: True)


def read(folder: Path) -> list[RoundRecord]:
    return BufferReader(str(folder), with_taps=True).read().records


def rounds() -> list[RecordedRound]:
    taps = RecordedTaps((1, 3), 2, np.arange(12, dtype=np.uint16).reshape(3, 4))
    penalty, tapped = round_of(3, number=3, seed=2), round_of(1, number=4, taps=taps, seed=3)
    shorter = round_of(3, number=5, seed=4)
    return [
        round_of(3),
        round_of(2, number=1, one_hot=True, temperature=0.0),
        round_of(2, number=2, dtype=torch.bfloat16, seed=1),
        # One with a penalty between two others: text alone.
        penalty._replace(
            rows=[row._replace(place=-1 if row.place == 1 else row.place) for row in penalty.rows]
        ),
        tapped._replace(rows=[*plain(4, taps=taps).rows, *tapped.rows]),
        # Two drafted tokens in the first row, whose logits are two rows and the third's behind it.
        RecordedRound(
            [shorter.rows[0]._replace(drafted=TOKENS[:2]), shorter.rows[2]],
            0.1 + 0.2,
            LoggedRound(torch.randn(11, VOCAB), torch.randn(3, 3, VOCAB), [[3, 4], TOKENS, TOKENS]),
        ),
        plain(6, last=True, context=[], request='of "é"-1'),
    ]


def put(sink: Any, made: list[RecordedRound]) -> None:
    for round in made:
        sink.put_round(round)


def test_rows_are_those_that_the_thread_writes(
    sink: Callable[..., ProcessWriter], tmp_path: Path
) -> None:
    written, other = sink(), BufferWriter(str(tmp_path / "other"), flush_s=60.0)
    put(written, rounds())
    write(written)
    put(other, rounds())
    other.close()
    found, expected = read(tmp_path / "buffer"), read(tmp_path / "other")
    assert len(found) == len(expected) == 15
    assert written.counts == other.counts == SinkCounts(written=15)
    for one, same in zip(found, expected):
        same_records(one, same)


def same_records(one: RoundRecord, same: RoundRecord) -> None:
    """To the bit."""
    assert [len(one.p), len(one.q)] == [len(same.p), len(same.q)]
    for part, twin in ((one.p, same.p), (one.q, same.q)):
        assert each(part) == each(twin)
    assert (one.taps is None) == (same.taps is None)
    if one.taps is not None and same.taps is not None:
        assert one.taps[:2] == same.taps[:2]
        np.testing.assert_array_equal(one.taps.values, same.taps.values)
    bare = [dataclasses.replace(record, p=NOTHING, q=NOTHING, taps=None) for record in (one, same)]
    assert bare[0] == bare[1]


def test_a_full_ring_takes_reduced_rows_then_none_and_waits_for_nothing(
    sink: Callable[..., ProcessWriter], tmp_path: Path
) -> None:
    small = sink(capacity=16384)
    assert small.share == 1.0
    begun_s = time.monotonic()
    for number in range(12):
        put(small, [round_of(1, number=number)])
    assert time.monotonic() - begun_s < 20.0
    # 2 x 3 x 300 logits take 7,200 bytes, what is stored of them 3,200: one of each.
    assert small.share == 0.0 and small.counts == SinkCounts(dropped=10)
    write(small)
    records = read(tmp_path / "buffer")
    assert [len(each(one.p)[0].ids) for one in records] == [64, 64]
    assert small.share == 1.0 and small.counts == SinkCounts(written=2, dropped=10)


def test_states_without_room_are_left_out_before_records_are(
    sink: Callable[..., ProcessWriter], tmp_path: Path
) -> None:
    small = sink(capacity=8192)
    put(small, [plain(taps=RecordedTaps((1,), 0, np.zeros((64, 256), np.uint16)))])
    write(small)
    assert small.counts == SinkCounts(written=1, untapped=1)
    assert [one.taps for one in read(tmp_path / "buffer")] == [None]


def test_tokens_alone_and_masked_texts(
    sink: Callable[..., ProcessWriter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    tiny_target: Callable[..., str],
) -> None:  # fmt: skip
    bare = sink()
    put(bare, [round_of(1)])
    write(bare, distributions=False)
    assert [p.ids for p in each(read(tmp_path / "buffer")[0].p)] == [[], [], []]
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hooks_of_process.py").write_text("def all(text): return [(0, len(text))]\n")
    masked = sink()
    put(masked, [round_of(1, number=0), plain(1, last=True, position=6)])
    write(masked, redact="hooks_of_process:all", tokenizer=tiny_target("llama"))
    found = read(tmp_path / "buffer")[1:]
    # Round 0 was 1, 2, 3, 9; 1 is the token that masks.
    assert found[0].context + found[0].committed == [1] * 4 and not found[0].p


def test_a_disk_that_refuses_is_one_sentence_and_counted(
    sink: Callable[..., ProcessWriter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def refuse(self: ShardFolder, name: str, data: bytes) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(ShardFolder, "put", refuse)
    monkeypatch.setattr(process_writer, "PATIENCE_S", 0.0)
    full = sink()
    put(full, rounds())
    write(full)
    assert full.counts == SinkCounts(dropped=15)
    assert [line.message.count("Read-only file system") for line in caplog.records] == [1]


def test_what_a_killed_writer_had_taken_is_counted_as_lost(
    sink: Callable[..., ProcessWriter], tmp_path: Path
) -> None:
    made = sink()
    put(made, [round_of(2)])
    killed = process_writer.RecordWriter(made.ring, WriterJob(str(tmp_path / "elsewhere")))
    killed.buffer.put = lambda record: None  # type: ignore[method-assign]
    assert killed.take()  # and ends here, before it has left a word about it
    put(made, [round_of(3, number=1)])
    write(made)
    assert made.counts == SinkCounts(written=3, lost=2)
    assert [one.round for one in read(tmp_path / "buffer")] == [1, 1, 1]
    killed.buffer.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(child_module, "LOOK_S", 0.05)
    monkeypatch.setattr(process_module, "CLOSE_S", 240.0)
    yield


@pytest.mark.usefixtures("quick")
def test_what_a_writer_left_that_died_as_the_server_ended_is_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "LOOK_S", 60.0)
    real = child_module.subprocess
    starts: list[Any] = []

    def popen(command: list[str], **options: Any) -> Any:
        starts.append(command)
        return real.Popen(["/bin/false"] if len(starts) == 1 else command, **options)

    stand_in = SimpleNamespace(Popen=popen, PIPE=real.PIPE, TimeoutExpired=real.TimeoutExpired)
    monkeypatch.setattr(child_module, "subprocess", stand_in)
    sink = ProcessWriter(WriterJob(str(tmp_path / "buffer")))
    wait_until(lambda: sink.child.process is not None and sink.child.process.poll() is not None)
    put(sink, [round_of(1)])
    sink.close()
    assert len(starts) == 2 and sink.counts == SinkCounts(written=1)


def test_a_round_of_which_nothing_can_be_made_costs_only_itself(
    sink: Callable[..., ProcessWriter], tmp_path: Path
) -> None:
    made = sink()
    strange = plain(1, drafted=[VOCAB + 1], place=0)._replace(
        logits=LoggedRound(torch.randn(2, VOCAB), None, [[VOCAB + 1]])
    )
    put(made, [round_of(2), strange, round_of(1, number=2)])
    write(made)
    assert made.counts == SinkCounts(written=3, dropped=1)
    assert [one.round for one in read(tmp_path / "buffer")] == [0, 0, 2]
