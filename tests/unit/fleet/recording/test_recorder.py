"""The recorder in a stand-in of vLLM's worker, read by the real writer: records are the texts that
clients get, and nothing that fails in it reaches the engine."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.distill.buffer.traffic import stitch
from draftsmith.fleet.recording import recorder as recorder_module
from draftsmith.fleet.recording.recorder import Chooser, adjusts, is_recordable, meta_of
from draftsmith.fleet.recording.seam import kind_of
from draftsmith.fleet.recording.writer import record_name
from draftsmith.fleet.vllm import plugin
from draftsmith.fleet.vllm.plugin import expand
from draftsmith.fleet.vllm.worker import Settings, WorkerState
from draftsmith.shared_ring import Ring
from tests.round_records import each
from tests.unit.fleet.recording.stand_ins import (
    VOCAB,
    FirstSampler,
    Lab,
    SecondSampler,
    Worker,
    Writer,
    first_call,
    new_request,
    params,
    scheduled,
)

A, B = "cmpl-a-0-00000001", "cmpl-b-0-00000002"


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "buffer")


@pytest.mark.parametrize("later", [False, True])
def test_records_are_the_texts_with_what_verification_had(lab: Lab, later: bool) -> None:
    worker, outputs = lab.worker, []
    step = worker.step
    outputs.append(step(scheduled([new_request(A, [5, 6])]), {A: [7]}, later=later))
    lab.state.version = "2"  # a swap: what is verified next was drafted before it
    call = first_call([[8, 9, 10], [3, 4]], probs=True)
    p, q = call[2].clone(), call[1]
    assert q is not None
    new = scheduled([new_request(B, [1, 2, 3])])
    outputs.append(step(new, {A: [8, 11], B: [3, 4, 12]}, (*call, None), later=later))
    assert worker.returned == "sampled"
    call = first_call([[20, 21]])
    outputs.append(step(scheduled(), {A: [20, 21, 22], B: []}, (*call, None), later=later))
    if later:
        for output in outputs:
            assert output.get_output().req_ids
    step(scheduled(finished=(A,)), {B: [13]})
    step(scheduled(finished=(B,)), {})
    records = lab.records()
    texts = {name: stitch(own).tokens for name, own in records.items()}  # type: ignore[union-attr]
    assert texts == {
        record_name(A): [5, 6, 7, 8, 11, 20, 21, 22],
        record_name(B): [1, 2, 3, 3, 4, 12, 13],
    }
    of_a = records[record_name(A)]
    assert [(one.drafted, one.accepted, one.draft_version) for one in of_a] == [
        ([8, 9, 10], 1, "1"), ([20, 21], 2, "2"), ([], 0, ""),
    ]  # fmt: skip
    rows = [0, 1, 2, 4, 5]
    both = [*each(of_a[0].p), *each(records[record_name(B)][0].p)]
    for row, logged, token in zip(rows, both, [8, 9, 10, 3, 4], strict=True):
        expected = torch.log_softmax(p[row], -1)
        assert logged.drafted == pytest.approx(float(expected[token]), abs=1e-5)
        assert logged.ids == expected.topk(VOCAB).indices.tolist()
    both = [*each(of_a[0].q), *each(records[record_name(B)][0].q)]
    for row, logged in enumerate(both):
        np.testing.assert_allclose(np.exp(logged.logprobs), q[row].sort(descending=True)[0], 2e-3)
    assert [one.ids for one in each(of_a[1].q)] == [[20], [21]]
    assert lab.recorder.status()["tokens"] == 10 and lab.recorder.status()["errors"] == 0


def test_what_an_accelerator_reduces_is_what_the_writer_reduces(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for raw, one in ((True, lab), (False, Lab(tmp_path / "other"))):
        monkeypatch.setattr(recorder_module, "crosses_raw", lambda logits, raw=raw: raw)
        one.worker.step(scheduled([new_request(A, [5], temperature=0.5)]), {A: [7]})
        call = first_call([[8, 9, 10]], probs=True)
        one.worker.step(scheduled(), {A: [8, 11]}, (*call, None))
        assert one.recorder.errors == 0
        (records,) = one.records().values()
        found.append(records[0])
    for copied, reduced in ((found[0].p, found[1].p), (found[0].q, found[1].q)):
        assert len(copied) == len(reduced) == 3
        for left, right in zip(each(copied), each(reduced)):
            assert left.ids == right.ids and left.logprobs == right.logprobs
            assert left.log_norm == pytest.approx(right.log_norm, abs=1e-4)
            assert left.drafted == pytest.approx(right.drafted, abs=1e-4)
            assert left.tail == pytest.approx(right.tail, abs=1e-4)


def gumbel(monkeypatch: pytest.MonkeyPatch, *parameters: str) -> None:
    """vLLM's second runner, whose sampling of drafts has these parameters."""
    names = ["vllm", "v1", "worker", "gpu", "sample", "gumbel"]
    for end in range(1, len(names) + 1):
        name = ".".join(names[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module, space = sys.modules[".".join(names)], {}  # type: ignore[var-annotated]
    exec(f"def gumbel_sample({', '.join(('logits', *parameters))}): ...", space)
    module.gumbel_sample = space["gumbel_sample"]  # type: ignore[attr-defined]


def second_lab(folder: Path) -> Lab:
    lab = Lab(folder, SecondSampler())
    lab.worker.model_runner.sampler = SimpleNamespace(
        sampling_states=SimpleNamespace(
            temperature=SimpleNamespace(gpu=torch.tensor([0.5, 0.0, 1.0]))
        )
    )
    return lab


def second_call() -> tuple[torch.Tensor, Any, torch.Tensor, None]:
    """Requests in states 0 and 2; rows of A: last token, two drafted; B drafts nothing."""
    batch = SimpleNamespace(
        num_reqs=2, req_ids=[A, B], cu_num_logits_np=np.array([0, 3, 4]),
        is_prefilling_np=np.array([False, False]), idx_mapping_np=np.array([0, 2]),
        expanded_idx_mapping=torch.tensor([0, 0, 0, 2]),
        expanded_local_pos=torch.tensor([0, 1, 2, 0]),
        input_ids=torch.tensor([7, 20, 21, 8, 0, 0]), logits_indices=torch.tensor([0, 1, 2, 3]),
    )  # fmt: skip
    return torch.randn(4, VOCAB), batch, torch.randn(3, 3, VOCAB), None


@pytest.mark.parametrize(
    ("parameter", "divisor"), [("logits_cache", 0.5), ("output_processed_logits", 1.0)]
)
def test_the_second_runners_call_gives_the_same_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameter: str, divisor: float
) -> None:
    gumbel(monkeypatch, parameter)
    lab = second_lab(tmp_path / "buffer")
    assert lab.recorder.seam.kind == "second" and lab.recorder.seam.num_speculative_steps == 3
    step, call = lab.worker.step, second_call()
    step(scheduled([new_request(A, [5], temperature=0.5), new_request(B, [6])]), {A: [7], B: [8]})
    step(scheduled(), {A: [20, 30], B: [9]}, call)
    step(scheduled(finished=(A, B)), {})
    records = lab.records()[record_name(A)]
    assert (records[0].drafted, records[0].accepted) == ([20, 21], 1)
    for depth, token in enumerate([20, 21]):
        p = torch.log_softmax(call[0][depth], -1)[token]
        q = torch.log_softmax(call[2][0, depth] / divisor, -1)[token]
        assert each(records[0].p)[depth].drafted == pytest.approx(float(p), abs=1e-5)
        assert each(records[0].q)[depth].drafted == pytest.approx(float(q), abs=1e-5)


@pytest.mark.parametrize("reason", ["adaptive", "unknown"])
def test_of_the_second_runner_nothing_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    gumbel(monkeypatch, *(["logits_cache"] if reason == "adaptive" else []))
    lab = second_lab(tmp_path / "buffer")
    if reason == "adaptive":
        lab.worker.model_runner.adaptive_verification = object()
    step = lab.worker.step
    step(scheduled([new_request(A, [5], temperature=0.5), new_request(B, [6])]), {A: [7], B: [8]})
    step(scheduled(), {A: [20, 30], B: [9]}, second_call())
    step(scheduled(finished=(A, B)), {})
    (record,) = lab.records()[record_name(A)]
    assert record.drafted == [] and record.context == [5, 7, 20, 30]
    assert lab.recorder.errors == 0


@pytest.mark.parametrize("prefills", [False, True])
def test_a_rank_that_verifies_a_part_takes_no_other_requests_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefills: bool
) -> None:
    """Sharded sampling: three requests, of which this rank has the second and the third. The flags
    stay those of all three."""
    gumbel(monkeypatch, "logits_cache")
    lab = second_lab(tmp_path / "buffer")
    call = second_call()
    call[1].is_prefilling_np = np.array([not prefills, prefills, False])
    lab.worker.model_runner.req_states = SimpleNamespace(
        num_computed_prefill_tokens=np.array([1, 0, 1]),
        prefill_len=SimpleNamespace(np=np.array([9 if prefills else 1, 9, 1])),
    )
    step = lab.worker.step
    step(scheduled([new_request(A, [5], temperature=0.5), new_request(B, [6])]), {A: [7], B: [8]})
    step(scheduled(), {A: [20, 30], B: [9]}, call)
    step(scheduled(finished=(A, B)), {})
    assert lab.records()[record_name(A)][0].drafted == ([] if prefills else [20, 21])


def test_a_preempted_request_goes_on_and_one_with_other_tokens_ends(lab: Lab) -> None:
    step = lab.worker.step
    step(scheduled([new_request(A, [5]), new_request(B, [6])]), {A: [7], B: [8]})
    step(scheduled(resumed={A: [5, 7], B: [6]}), {A: [9], B: [8]})  # B's 8 was thrown away
    step(scheduled(finished=(A, B)), {})
    texts = {name: stitch(own).tokens for name, own in lab.records().items()}  # type: ignore[union-attr]
    assert texts == {record_name(A): [5, 7, 9], record_name(B): [6, 8]}


def test_a_full_ring_ends_requests_in_the_records_and_counts_them(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "buffer", capacity=2048)
    step = lab.worker.step
    step(scheduled([new_request(A, [5])]), {A: [7]})
    first = first_call([[8, 9, 10, 11]])
    step(scheduled(), {A: [8, 12]}, (*first, None))  # 4 rows of 48 floats do not fit
    for _ in range(40):
        step(scheduled(), {A: [13]})
    status = lab.recorder.status()
    assert status["dropped_requests"] == 1 and status["running"] == 0 and status["errors"] == 0
    step(scheduled([new_request(B, [5])]), {B: [7]})  # more than half full: none is begun
    assert lab.recorder.status()["requests"] == 1
    (records,) = lab.records().values()
    text = stitch(records)
    assert text is not None and text.tokens[:5] == [5, 7, 8, 12, 13]
    assert all(not one.drafted for one in records)


def test_no_error_of_the_recorder_reaches_the_engine(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    step = lab.worker.step
    step(scheduled([new_request(A, [5])]), {A: [7]})
    broken = SimpleNamespace(num_draft_tokens=None)
    with caplog.at_level(logging.ERROR):
        step(SimpleNamespace(), {A: [8]}, (broken, None, torch.zeros(1, VOCAB), None))
        assert lab.worker.returned == "sampled"
        assert step(scheduled(), {A: [8]}).sampled_token_ids == [[8]]
        for _ in range(5):
            step(SimpleNamespace(), {A: [8]})
    assert lab.recorder.errors == 6 and len(caplog.records) == 3
    (records,) = lab.records().values()
    assert stitch(records).tokens == [5, 7]  # type: ignore[union-attr]


def test_a_new_writer_begins_with_new_requests(lab: Lab) -> None:
    step = lab.worker.step
    step(scheduled([new_request(A, [5])]), {A: [7]})
    lab.writer.generation = 2
    step(scheduled([new_request(B, [6])]), {A: [8], B: [9]})
    assert set(lab.recorder.tracked) == {B}
    lab.writer.alive = False
    step(scheduled([new_request("c", [6])]), {B: [8]})
    assert not lab.recorder.tracked and not lab.recorder.status()["recording"]


def test_a_recorder_that_ends_leaves_the_worker_as_it_was(lab: Lab) -> None:
    lab.recorder.close()
    assert isinstance(lab.worker.model_runner.rejection_sampler, FirstSampler)
    assert "execute_model" not in vars(lab.worker) and lab.writer.closed


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"presence_penalty": 0.5}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"min_tokens": 3}, True),
        ({"bad_words": ["x"]}, True),
        ({"structured_outputs": object()}, True),
        ({"logit_bias": {}}, False),
        ({"min_p": 0.1}, True),
    ],
)
def test_parameters_that_change_a_distribution(changes: dict[str, Any], expected: bool) -> None:
    assert adjusts(params(**changes), "first") is expected
    assert not adjusts(params(min_p=0.1), "second")


def test_meta_of_a_request() -> None:
    new = new_request(A, [1], seed=4, top_k=-1, stop_token_ids=[9], max_tokens=None)
    new.sampling_params.extra_args = {"draftsmith_class": "code"}
    meta = meta_of(new, 0.5, "first", 77)
    assert (meta.request_class, meta.share, meta.seeded, meta.top_k) == ("code", 0.5, True, 0)
    assert (meta.stops, meta.max_tokens) == ([0, 9], 77)
    new.sampling_params.temperature = 1e-7
    assert not meta_of(new, 0.5, "first", 77).seeded


def test_requests_that_no_record_can_hold() -> None:
    assert is_recordable(new_request(A, [1]))
    assert not is_recordable(new_request(A, None))
    assert not is_recordable(new_request(A, [1], repetition_detection=object()))
    for name in ("lora_request", "prompt_embeds"):
        new = new_request(A, [1])
        setattr(new, name, object())
        assert not is_recordable(new)


def test_shares_of_requests() -> None:
    chooser = Chooser(0.5, seed=0)
    plain = params()
    found = [chooser.share(plain, 0.5) for _ in range(400)]
    assert set(found) == {0.0, 0.5} and 160 < sum(share > 0 for share in found) < 240
    own = params(extra_args={"draftsmith_share": 1.0})
    assert chooser.share(own, 0.5) == 1.0 and chooser.share(own, 0.0) == 0.0
    assert chooser.share(params(extra_args={"draftsmith_record": False}), 0.5) == 0.0


def test_an_engine_that_is_not_recognised_is_not_recorded(tmp_path: Path) -> None:
    class Other:
        def __call__(self, everything: Any) -> None:
            """Takes other arguments."""

    for worker, clause in (
        (Worker(Other()), "another call"),
        (Worker(None), "another call"),
        (Worker(FirstSampler(), speculative_config=None), "drafts nothing"),
    ):
        state = WorkerState(Settings(buffer=str(tmp_path)))
        plugin.attach(worker, state)
        assert worker.compile_or_warm_up_model() == "warm"
        assert state.recorder is None and clause in plugin.missing(worker)
        worker.shutdown()
    assert kind_of(FirstSampler()) == "first" and kind_of(Other()) == ""


def test_a_recorder_begins_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[dict[str, Any]] = []

    def child(module: str, job: dict[str, Any], share: float) -> Writer:
        made.append(job)
        return Writer(Ring.create(1 << 12))

    monkeypatch.setattr(plugin, "Child", child)
    worker = Worker(FirstSampler())
    worker.vllm_config.parallel_config.data_parallel_index = 2  # its rank is 0 for a dense target
    worker.vllm_config.speculative_config.draft_sample_method = "probabilistic"
    state = WorkerState(Settings(buffer=str(tmp_path), engine="e"))
    plugin.attach(worker, state)
    assert state.recorder is None
    worker.compile_or_warm_up_model()
    assert state.recorder is not None
    assert made == [
        {
            "buffer": str(tmp_path), "engine": "e-2", "target": "org/target",
            "target_revision": "", "sampler": "probabilistic", "rule": "chain", "share": 1.0,
            "max_length": 1000,
        }
    ]  # fmt: skip
    worker.shutdown()
    assert state.recorder.child.closed


def test_the_mended_kernel_writes_each_requests_value_at_its_tokens() -> None:
    output = torch.full((6,), -1.0)
    expand(output, torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 6], dtype=torch.int32), 0, 1)
    assert output.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0, 2.0]
    output = torch.zeros(3)
    expand(output, torch.tensor([0.0, 3.0]), torch.tensor([1, 3]), 0, 1)
    assert output.tolist() == [1.0, 3.0, 3.0]
