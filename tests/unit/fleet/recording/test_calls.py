"""The recorder fed with real calls of vLLM 0.32 on the CPU (`capture.py`): its records are the
texts that vLLM gave, with p and q of its own logits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.distill.buffer.traffic import stitch
from draftsmith.record import RoundRecord
from tests.unit.fleet.recording.stand_ins import Lab, new_request, scheduled

CALLS = np.load(Path(__file__).with_name("calls.npz"))
STORY = json.loads(CALLS["steps"].tobytes())


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RoundRecord]]:
    lab = Lab(tmp_path_factory.mktemp("calls"), max_length=64)
    for number, step in enumerate(STORY["steps"]):
        new = [
            new_request(one["req_id"], one["prompt_token_ids"], **one["params"])
            for one in step["new"]
        ]
        lab.worker.model_runner.input_batch.req_ids = step.get("req_ids", [])
        sampled = dict(zip(step.get("output_ids", []), step.get("sampled", [])))
        schedule = scheduled(new, step["finished"], step["resumed"])
        lab.worker.step(schedule, sampled, call_of(number, step), batch=step.get("req_ids"))
    assert lab.recorder.errors == 0
    return lab.records(seeded=True)


def call_of(number: int, step: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of the rejection sampler in a step; () where it was not called."""
    if "counts" not in step:
        return ()
    names = ("draft_token_ids", "target_logits_indices", "bonus_logits_indices")
    arrays = {name: torch.from_numpy(CALLS[f"{number}/{name}"]) for name in names}
    metadata = SimpleNamespace(num_draft_tokens=step["counts"], **arrays)
    probs = f"{number}/draft_probs"
    q = torch.from_numpy(CALLS[probs]) if probs in CALLS else None
    return metadata, q, torch.from_numpy(CALLS[f"{number}/logits"]), None


def test_texts_are_those_that_vllm_gave(records: dict[str, list[RoundRecord]]) -> None:
    texts = [stitch(own) for own in records.values()]
    assert sorted(text.tokens for text in texts if text) == sorted(STORY["texts"])
    assert all(own[-1].last for own in records.values())
    rounds = [one for own in records.values() for one in own if one.drafted]
    assert len(rounds) > 12 and sum(one.accepted for one in rounds) > 0
    assert {len(one.drafted) for one in rounds} <= {1, 2}


def test_marks_of_requests(records: dict[str, list[RoundRecord]]) -> None:
    of = {tuple(own[0].context[:2]): own for own in records.values()}
    assert [one.seeded for one in of[11, 12]] == [True] * len(of[11, 12])
    assert not any(one.seeded for name, own in of.items() if name != (11, 12) for one in own)
    assert all(len(one.p) == 0 for one in of[21, 5])
    assert {one.temperature for one in of[3, 4]} == {0.0}
    assert of[7, 7][0].top_p == pytest.approx(0.9)


def test_p_and_q_are_those_of_the_calls(records: dict[str, list[RoundRecord]]) -> None:
    logged = [
        (token, float(p.drafted), float(q.drafted))
        for own in records.values()
        for one in own
        for token, p, q in zip(one.drafted, one.p, one.q)
    ]
    given = []
    for number, step in enumerate(STORY["steps"]):
        if not any(step.get("counts", [])):
            continue
        logits = torch.from_numpy(CALLS[f"{number}/logits"])
        tokens = CALLS[f"{number}/draft_token_ids"].tolist()
        p = torch.log_softmax(logits[CALLS[f"{number}/target_logits_indices"]], -1)
        q = torch.from_numpy(CALLS[f"{number}/draft_probs"]).log()
        given += [(t, float(p[i, t]), float(q[i, t])) for i, t in enumerate(tokens)]
    assert len(logged) > 20
    for one in logged:
        assert any(np.allclose(one, other, atol=1e-4) for other in given)
