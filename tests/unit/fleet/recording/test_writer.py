"""The writer fed as an engine feeds it: records stitched to the text that the client gets, with p
and q of what verification had."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith import child_process as child_module
from draftsmith.child_process import Child
from draftsmith.distill.buffer import process_writer
from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
from draftsmith.distill.buffer.traffic import stitch
from draftsmith.fleet.recording import writer as writer_module
from draftsmith.fleet.recording.messages import (
    WRITER,
    MessageKind,
    RequestMeta,
    StepMeta,
    meta_array,
)
from draftsmith.fleet.recording.writer import EngineJob, record_name, run
from draftsmith.kernels.sampling import logged
from draftsmith.record import RoundRecord, hashed_answer
from draftsmith.shared_ring import Ring, send
from tests import forked
from tests.round_records import each
from tests.waiting import wait_until

META = RequestMeta("cmpl-a-0-0123abcd", "code", 1.0, 1.0, 0, 1.0, 0.0, False, False, 100, [2])
VOCAB = 300


def job(buffer: Path, **changes: Any) -> EngineJob:
    plain = EngineJob(str(buffer), "e", "t", "r", "greedy", "chain", 1.0, 1000)
    return dataclasses.replace(plain, **changes)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Engine:
    """Messages of an engine with one request at a time."""

    def __init__(self, ring: Ring):
        self.ring, self.step = ring, 0
        self.generator = torch.Generator().manual_seed(0)

    def begin(self, handle: int, prompt: list[int], meta: RequestMeta = META) -> None:
        assert send(self.ring, MessageKind.BEGIN, handle, [meta_array(meta), ints(*prompt)])

    def verify(
        self, handle: int, drafted: list[int], sampled: list[int], *, version: str = "3"
    ) -> torch.Tensor:
        """One step; returns its raw p [n, V]."""
        p = torch.randn(len(drafted), VOCAB, generator=self.generator)
        arrays = [
            meta_array(StepMeta(version, "w1", "float32")), ints(handle), ints(len(drafted)),
            ints(*drafted), p.numpy(), np.zeros((0, 0), np.float32),
        ]  # fmt: skip
        assert send(self.ring, MessageKind.POSITIONS, self.step, arrays)
        self.sample(handle, sampled)
        return p

    def sample(self, handle: int, sampled: list[int]) -> None:
        arrays = [ints(handle), ints(len(sampled)), ints(*sampled)]
        assert send(self.ring, MessageKind.TOKENS, self.step, arrays)
        self.step += 1

    def end(self, *handles: int) -> None:
        assert send(self.ring, MessageKind.END, 0, [ints(*handles)])


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., dict[str, list[RoundRecord]]]:
    """Records, by request, of what `act` sends to a writer."""

    def write(act: Callable[[Engine], None], **changes: Any) -> dict[str, list[RoundRecord]]:
        ring = Ring.create(1 << 20)
        act(Engine(ring))
        run(ring, job(tmp_path / "buffer", **changes), lambda seconds: True)
        records: dict[str, list[RoundRecord]] = {}
        reading = BufferReader(str(tmp_path / "buffer")).read()
        for one in reading.records:
            records.setdefault(one.request, []).append(one)
        write.status = json.loads(ring.status() or b"{}")  # type: ignore[attr-defined]
        write.seeded = reading.seeded  # type: ignore[attr-defined]
        return records

    return write


def test_the_likeliest_tokens_are_found_by_the_compiled_kernel(
    written: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[bool] = []
    read: list[int] = []
    real = logged.prob_arrays_compiled

    def prob_arrays(logits: torch.Tensor, *arguments: Any) -> Any:
        read.append(len(logits))
        return real(logits, *arguments)

    monkeypatch.setattr(logged, "prob_arrays_compiled", prob_arrays)
    monkeypatch.setattr(writer_module, "prepare_arrays", lambda: prepared.append(not read))

    def act(engine: Engine) -> None:
        engine.begin(1, [10, 11, 12])
        engine.verify(1, [14, 15, 16], [14, 15, 99])
        engine.end(1)

    (records,) = written(act).values()
    assert prepared == [True] and read == [3] and len(records[0].p) == 3


def test_records_of_a_request_are_its_text_with_p_and_q(written: Callable[..., Any]) -> None:
    logits: list[torch.Tensor] = []

    def act(engine: Engine) -> None:
        engine.begin(1, [10, 11, 12])
        engine.sample(1, [13])  # the prefill
        logits.append(engine.verify(1, [14, 15, 16], [14, 15, 99]))
        engine.sample(1, [])  # a step in which it had no turn
        engine.sample(1, [17])
        logits.append(engine.verify(1, [20, 21], [20, 21, 22], version="4"))
        engine.verify(1, [2, 5, 6], [2, 5, 7])  # 2 ends it

    (records,) = written(act).values()
    text = stitch(records)
    assert text is not None and text.tokens == [10, 11, 12, 13, 14, 15, 99, 17, 20, 21, 22, 2]
    assert [one.drafted for one in records] == [[14, 15, 16], [20, 21], [2, 5, 6], []]
    assert [one.accepted for one in records] == [2, 2, 2, 0]
    assert [one.draft_version for one in records] == ["3", "4", "3", ""]
    assert [one.last for one in records] == [False, False, False, True]
    first = records[0]
    assert (first.request, first.request_class, first.share) == (
        record_name(META.id), "code", 1.0,
    )  # fmt: skip
    assert (first.engine, first.rule, first.sampler) == ("e", "chain", "greedy")
    assert (first.weight_version, first.target_revision) == ("w1", "r")
    for record, raw in zip(records, logits):
        logprobs = torch.log_softmax(raw, -1)
        for position, (p, q) in enumerate(zip(each(record.p), each(record.q), strict=True)):
            expected, ids = logprobs[position].topk(64)
            assert p.ids == ids.tolist() and len(p.ids) == 64
            np.testing.assert_allclose(p.logprobs, expected.numpy(), atol=6e-4)
            token = record.drafted[position]
            assert p.drafted == pytest.approx(float(logprobs[position, token]), abs=1e-5)
            assert (q.ids, q.drafted, q.tail) == ([token], 0.0, 0.0)


@pytest.mark.parametrize("sampler, top_k, expected", [
    ("probabilistic", 0, "probabilistic"),
    ("probabilistic", 20, "unfiltered"),
    ("greedy", 20, "greedy"),
])  # fmt: skip
def test_drawn_drafts_of_a_filtered_request_are_unfiltered(
    written: Callable[..., Any], sampler: str, top_k: int, expected: str
) -> None:
    def act(engine: Engine) -> None:
        engine.begin(1, [10, 11], META._replace(top_k=top_k))
        engine.verify(1, [14, 15], [14, 99])
        engine.end(1)

    (records,) = written(act, sampler=sampler).values()
    assert [one.sampler for one in records if one.drafted] == [expected]


def test_a_temperature_has_its_norm_and_drawn_drafts_their_q(written: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    p = torch.randn(2, VOCAB)
    q = torch.softmax(torch.randn(2, VOCAB), -1)

    def act(engine: Engine) -> None:
        engine.begin(1, [10], META._replace(temperature=0.5))
        arrays = [
            meta_array(StepMeta("1", "", "bfloat16", True)), ints(1), ints(2), ints(4, 5),
            p.bfloat16().view(torch.int16).numpy().view(np.uint16), q.numpy(),
        ]  # fmt: skip
        assert send(engine.ring, MessageKind.POSITIONS, 0, arrays)
        engine.sample(1, [4, 9])

    (records,) = written(act, sampler="probabilistic").values()
    first = records[0]
    logprobs = torch.log_softmax(p.bfloat16().float(), -1)
    p_logged, q_logged = each(first.p), each(first.q)
    for n, token in enumerate([4, 5]):
        norm = torch.logsumexp(logprobs[n] / 0.5, -1)
        assert p_logged[n].log_norm == pytest.approx(float(norm), abs=1e-4)
        assert q_logged[n].drafted == pytest.approx(float(q[n, token].log()), abs=1e-4)
        assert sorted(q_logged[n].ids) == sorted(q[n].topk(64).indices.tolist())
    assert first.sampler == "probabilistic"


def test_an_answer_ends_where_the_scheduler_ends_it(written: Callable[..., Any]) -> None:
    def act(engine: Engine) -> None:
        engine.begin(1, [10, 11], META._replace(max_tokens=3))
        engine.verify(1, [5, 6, 7], [5, 6, 7, 8])
        engine.verify(1, [5], [5, 6])  # of a step that was under way: no part of the answer
        engine.begin(2, [10, 11], META._replace(id="chatcmpl-b-0123abcd"))
        engine.verify(2, [5, 6, 7], [5, 6, 7, 8])
        engine.begin(3, [10], META._replace(id="cmpl-c-0-0123abcd"))
        engine.sample(3, [4])
        engine.end(3)  # aborted
        engine.sample(3, [5])
        engine.begin(4, [10], META._replace(id="cmpl-d-0-0123abcd"))
        engine.end(4)  # aborted before its first token

    records = written(act, max_length=5)
    texts = {name: stitch(found).tokens for name, found in records.items()}  # type: ignore[union-attr]
    assert texts == {
        record_name(META.id): [10, 11, 5, 6, 7],
        record_name("chatcmpl-b-0123abcd"): [10, 11, 5, 6, 7],
        record_name("cmpl-c-0-0123abcd"): [10, 4],
    }
    assert all(found[-1].last for found in records.values())
    assert records[record_name(META.id)][0].accepted == 3


def test_penalties_leave_p_and_q_out_and_seeds_are_marked(written: Callable[..., Any]) -> None:
    def act(engine: Engine) -> None:
        engine.begin(1, [10], META._replace(adjusts=True))
        engine.verify(1, [5], [5, 6])
        engine.end(1)
        engine.begin(2, [10], META._replace(id="cmpl-s-0-0123abcd", seeded=True))
        engine.verify(2, [5], [5, 6])
        engine.end(2)

    (records,) = written(act).values()
    assert records[0].drafted == [5] and len(records[0].p) == len(records[0].q) == 0
    assert written.seeded == 2  # type: ignore[attr-defined]


def test_drafted_tokens_that_do_not_fit_are_text_only(written: Callable[..., Any]) -> None:
    def act(engine: Engine) -> None:
        engine.begin(1, [10])
        engine.verify(1, [5, 6], [7, 8])
        engine.verify(1, [5, -1], [5, 8])
        engine.verify(1, [5], [5, 6])
        engine.end(1)

    (records,) = written(act).values()
    text = stitch(records)
    assert text is not None and text.tokens == [10, 7, 8, 5, 8, 5, 6]
    assert [one.drafted for one in records] == [[5], []]
    assert written.status["mismatched"] == 2  # type: ignore[attr-defined]


def test_a_status_shows_alpha_tau_and_losslessness_by_version(written: Callable[..., Any]) -> None:
    def act(engine: Engine) -> None:
        engine.begin(1, [10])
        engine.verify(1, [5, 6], [5, 6, 7])
        engine.verify(1, [5, 6], [8], version="4")
        engine.verify(1, [5, 6], [5, 9], version="4")
        engine.verify(1, [2, 6], [2, 6, 7], version="5")  # 2 ends the text

    written(act)
    status = written.status  # type: ignore[attr-defined]
    assert status["versions"]["3"]["alpha"] == 1.0 and status["versions"]["3"]["tau"] == 3.0
    assert status["versions"]["4"]["alpha"] == pytest.approx(1 / 3)
    assert status["versions"]["4"]["tau"] == 1.5 and status["versions"]["5"]["tau"] == 1.0
    assert status["versions"]["4"]["judged"] == 3 and status["written"] == 5


def test_an_answer_is_forgotten_by_the_id_that_its_client_has() -> None:
    for running, answer in (
        ("cmpl-abc-0-0123abcd", "cmpl-abc"),
        ("1_cmpl-abc-0-0123abcd", "cmpl-abc"),
        ("chatcmpl-abc-0123abcd", "chatcmpl-abc"),
        ("chatcmpl-user-7-0123abcd", "chatcmpl-user-7"),
        ("something", "something"),
    ):
        assert record_name(running).partition("-")[0] == hashed_answer(answer)
    names = [record_name(f"{n}_cmpl-a-{m}-0123abcd") for n in range(2) for m in range(2)]
    assert len(set(names)) == 4


def test_an_engine_that_is_killed_behind_its_writer_leaves_its_records(tmp_path: Path) -> None:
    """The writer is started again, and the last one flushes."""
    script = f"""
import dataclasses, os, signal
from tests.unit.fleet.recording.test_writer import *
child_module.LOOK_S = 0.05
child = Child(WRITER, dataclasses.asdict(job(Path({str(tmp_path / "buffer")!r}))), capacity=1 << 16)
wait_until(lambda: child.alive)
first, engine = child.pid, Engine(child.ring)
os.kill(first, signal.SIGSTOP)
engine.begin(1, [10])
# Nothing waits for a writer that does not read: what has no room is left out.
assert not send(child.ring, MessageKind.END, 0, [np.zeros(1 << 16, np.uint8)])
os.kill(first, signal.SIGKILL)
wait_until(lambda: child.generation == 2 and child.alive and child.pid != first)
engine.verify(1, [5], [5, 6])  # begun before: the new writer has no beginning of it
engine.begin(2, [10, 11], META._replace(id="cmpl-b-0-0123abcd"))
engine.verify(2, [5], [5, 6])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = forked.run([sys.executable, "-c", script], timeout=120)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: list((tmp_path / "buffer").glob("*.parquet")))
    records = BufferReader(str(tmp_path / "buffer")).read().records
    assert {one.request for one in records} == {record_name("cmpl-b-0-0123abcd")}
    text = stitch(records)
    assert text is not None and text.tokens == [10, 11, 5, 6] and records[-1].last


def test_a_writer_that_cannot_run_ends_recording_after_a_few_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "LOOK_S", 0.02)
    monkeypatch.setattr(child_module.sys, "executable", "/bin/false")
    broken = Child(WRITER, {})
    wait_until(lambda: broken.generation == child_module.RESTARTS + 1 and broken.process is None)
    assert not broken.alive and broken.status() == {}
    broken.close()


def test_a_writer_that_worked_is_started_again_however_often_it_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_module, "LOOK_S", 0.005)
    monkeypatch.setattr(child_module.sys, "executable", "/bin/false")
    left = itertools.count()
    monkeypatch.setattr(Ring, "statuses", property(lambda ring: next(left)))
    killed = Child(WRITER, {})
    wait_until(lambda: killed.generation > child_module.RESTARTS + 2)
    killed.close()
    assert killed.process is not None


def away_until(buffer: Path, seconds: float) -> threading.Timer:
    """A buffer whose folder is taken by a file for some time."""
    buffer.touch()
    timer = threading.Timer(seconds, buffer.unlink)
    timer.start()
    return timer


@pytest.mark.parametrize("at_start", [True, False])
def test_a_buffer_that_is_away_when_its_engine_ends_gets_the_last_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    monkeypatch.setattr(process_writer, "RETRY_S", 0.05)
    monkeypatch.setattr(writer_module, "BufferWriter", partial(BufferWriter, flush_s=0.1))
    buffer, ring, timers = tmp_path / "buffer", Ring.create(1 << 20), []
    engine = Engine(ring)
    engine.begin(1, [10, 11])
    engine.verify(1, [5], [5, 6])

    def ended(seconds: float) -> bool:
        if not at_start:
            buffer.rmdir()
            timers.append(away_until(buffer, 0.3))
        return True

    if at_start:
        timers.append(away_until(buffer, 0.3))
    run(ring, job(buffer), ended)
    for timer in timers:
        timer.join()
    text = stitch(BufferReader(str(buffer)).read().records)
    assert text is not None and text.tokens == [10, 11, 5, 6]
