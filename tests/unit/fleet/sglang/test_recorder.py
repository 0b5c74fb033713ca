"""Records from stand-ins of SGLang's verification, by the real writer: the texts that were
generated, with the distributions before penalties."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.distill.buffer.traffic import stitch
from draftsmith.fleet.sglang import plugin
from draftsmith.fleet.sglang.recorder import Recorder
from draftsmith.fleet.sglang.requests import is_recordable, meta_of
from draftsmith.fleet.vllm.settings import Settings
from draftsmith.fleet.wire.requests import Job, record_name
from draftsmith.fleet.wire.writer import run
from draftsmith.record import RoundRecord
from draftsmith.shared_memory.ring import Ring
from draftsmith.train.data.roles import Role
from tests.unit.fleet.recording.stand_ins import Writer
from tests.unit.fleet.sglang.stand_ins import VOCAB, Engine, Request, eagle_sample, rows

JOB = Job("", "e", "t", "r", "target-only", "tree", 1.0, 1000)


class Lab:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.writer = folder, Writer(Ring.create(1 << 20))
        self.recorder = Recorder(self.writer, version="3", most=1.0)  # type: ignore[arg-type]
        monkeypatch.setattr(plugin, "begin", lambda *_: self.recorder)
        self.engine = Engine(plugin.hook_of(Settings(buffer=str(folder))))

    def records(self) -> dict[str, list[RoundRecord]]:
        self.recorder.flush()
        run(self.writer.ring, replace(JOB, buffer=str(self.folder)), lambda _: True)
        found: dict[str, list[RoundRecord]] = {}
        for one in BufferReader(str(self.folder)).read().records:
            found.setdefault(one.request, []).append(one)
        return found


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path / "buffer", monkeypatch)


def test_records_are_the_texts_with_p_before_penalties(lab: Lab) -> None:
    a, b = Request("a", [5, 6, 7]), Request("b", [8, 9], temperature=0.5)
    engine = lab.engine
    engine.prefill(a, 11)
    engine.prefill(b, 12)
    best = rows(0, 8).argmax(-1).tolist()
    # a: a sibling of the first draft is kept, and nothing behind it. b: a chain that is rejected.
    wrong = (best[0] + 1) % VOCAB
    trees = [
        [(0, wrong), (0, best[0]), (2, (best[2] + 1) % VOCAB)],
        [(0, (best[4] + 1) % VOCAB), (1, 4), (2, 5)],
    ]
    assert [len(one) for one in engine.round([a, b], trees)] == [2, 1]
    engine.round([a, b], [[(0, 1)], [(0, 2)]], seed=1)
    a.is_over = b.is_over = True
    idle = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: True))
    assert lab.recorder.before(None, idle, None) is None
    records = lab.records()
    for req in (a, b):
        mine = records[record_name(req.rid)]
        text = stitch(mine)
        assert text is not None and text.tokens == engine.texts[req.rid] and mine[-1].last
        if req is a:
            assert text.roles[4:6].tolist() == [Role.ACCEPTED, Role.FIRST_REJECTED]
    first, *_ = records[record_name("a")]
    assert first.context == [5, 6, 7, 11] and first.draft_version == "3"
    assert first.drafted == [best[0], trees[0][2][1]] and first.accepted == 1
    assert (first.sampler, first.rule) == ("target-only", "tree")
    assert sorted(first.q[0].ids) == sorted([wrong, best[0]])
    assert first.q[1].ids == [first.drafted[1]]
    p = torch.log_softmax(engine.logits[0], -1)
    for at, row in enumerate((0, 2)):
        logged = first.p[at]
        assert logged.logprobs == pytest.approx(p[row][torch.tensor(logged.ids)].tolist(), abs=2e-3)
        assert logged.drafted == pytest.approx(float(p[row][first.drafted[at]]), abs=2e-3)
    chain, *_ = records[record_name("b")]
    assert chain.drafted == [token for _, token in trees[1]] and chain.accepted == 0
    assert len(chain.p) == 3 and chain.p[1].ids[0] == best[5]
    norm = float(torch.logsumexp(p[4] / 0.5, -1))
    assert chain.p[0].log_norm == pytest.approx(norm, abs=1e-3)


def test_a_request_that_was_begun_before_goes_on(lab: Lab) -> None:
    req = Request("a", [5, 6])
    lab.engine.texts["a"] = [5, 6, 20, 21, 22]
    req.output_ids = [20, 21, 22]
    lab.engine.round([req], [[(0, 1), (1, 2)]])
    unknown = Request("b", [5])
    lab.engine.texts["b"] = [5, 20, 21, 22]  # of which the scheduler has nothing
    lab.engine.round([unknown], [[(0, 1)]])
    lab.recorder.drop_all()
    records = lab.records()
    text = stitch(records[record_name("a")])
    assert text is not None and text.tokens == lab.engine.texts["a"]
    assert record_name("b") not in records and lab.recorder.dropped >= 1


def test_requests_that_are_not_recorded(lab: Lab) -> None:
    out = Request("a", [5], custom_params={"draftsmith_record": False})
    lab.engine.prefill(out, 1)
    lab.engine.round([out], [[(0, 1)]])
    assert not lab.recorder.tracked
    for name in ("lora_id", "input_embeds", "multimodal_inputs"):
        req = Request("a", [5])
        setattr(req, name, "x")
        assert not is_recordable(req)
    assert not is_recordable(Request("a", [5], beam_width=2)) and is_recordable(Request("a", [5]))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"temperature": 1.0, "top_k": 0, "adjusts": False, "seeded": False, "stops": [0]}),
        ({"top_k": 1}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        ({"top_k": 20, "top_p": 0.9}, {"top_k": 20, "top_p": 0.9}),
        ({"sampling_seed": 3}, {"seeded": True}),
        ({"sampling_seed": 3, "temperature": 0}, {"seeded": False}),
        ({"regex": "a+"}, {"adjusts": True}),
        ({"min_p": 0.1}, {"adjusts": True}),
        ({"ignore_eos": True, "stop_token_ids": {7}}, {"stops": [7]}),
        ({"custom_params": {"draftsmith_class": "code"}}, {"request_class": "code"}),
    ],
)
def test_properties_of_a_request(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = meta_of(Request("a", [5], **given), 1.0)._asdict()
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("name", ["before", "after", "flush"])
def test_the_engine_gets_its_own_answer_whatever_fails(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain = Engine(lambda original, *args: original(*args))
    for engine in (plain, lab.engine):
        engine.prefill(Request("a", [5]), 1)
    monkeypatch.setattr(lab.recorder, name, lambda *_: 1 / 0)
    request = Request("a", [5])
    assert lab.engine.round([request], [[(0, 1)]]) == plain.round([request], [[(0, 1)]])


def test_an_unknown_call_is_left_alone() -> None:
    def another(batch: Any, logits: Any) -> str:
        return "sampled"

    hook = plugin.hook_of(Settings(buffer="b"))
    assert hook(another, 1, 2) == "sampled" and hook(another, 1, logits=2) == "sampled"
    assert list(inspect.signature(eagle_sample).parameters)[:3] == plugin.READ


def test_the_hook_is_registered_where_there_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[Any, ...]] = []
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.__dict__["HookRegistry"] = SimpleNamespace(
        register=lambda *given: registered.append(given)
    )
    module.__dict__["HookType"] = SimpleNamespace(AROUND="around")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for text in (None, "{", json.dumps({"bufer": "x"}), json.dumps({"target": "t"})):
        if text is not None:
            monkeypatch.setenv(plugin.VARIABLE, text)
        plugin.register()
        assert not registered
    monkeypatch.setenv(plugin.VARIABLE, json.dumps({"buffer": "b"}))
    plugin.register()
    ((target, hook, kind),) = registered
    assert target == plugin.TARGET and kind == "around" and callable(hook)
