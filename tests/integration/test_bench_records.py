"""The measurement of what recording costs: its ways answer the same texts and record what they say."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.serve.engine import build
from scripts.bench.engine.records import measure


@pytest.mark.long
def test_states_are_recorded_in_their_own_turns_beside_the_same_texts(
    tiny_target: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "capture_forwards", lambda *given: None)
    target = Target.load(tiny_target("llama"))
    drafter = FAMILIES["eagle3"].create(Eagle3Options(), target, seed=1)
    checkpoint.save(drafter, tmp_path / "draft", target)
    options = argparse.Namespace(
        draft=str(tmp_path / "draft"), batch=2, k=2, turns=2, tokens=8, temperature=1.0,
        share=1.0, record_taps=64, thread=True,
    )  # fmt: skip
    prompts = [[50 + number, *range(60, 72)] for number in range(6)]
    found = measure(target, prompts, options, str(tmp_path))
    states = found["with_taps"]
    assert states["positions"] == found["positions"] > 0
    assert states["records"] == found["records"]
    assert states["bytes_a_token"] > found["bytes_a_token"]
    assert set(found["ms_a_turn"]) == {"off", "on", "thread", "with_taps"}
    assert states["throughput_of_recording"]["of_that_without"] > 0
    plain, threaded, tapped = (
        BufferReader(str(tmp_path / name), with_taps=True).read(max_records=1000).records
        for name in ("on", "thread", "with_taps")
    )
    assert [one.p[0].ids for one in plain if one.drafted] == [
        one.p[0].ids for one in threaded if one.drafted
    ]
    assert [one.committed for one in plain] == [one.committed for one in tapped]
    assert all(one.taps is None for one in plain) and any(one.taps is not None for one in tapped)
    without = measure(
        target,
        prompts,
        argparse.Namespace(**vars(options) | {"record_taps": 0, "thread": False}),
        str(tmp_path / "again"),
    )
    assert set(without["ms_a_turn"]) == {"off", "on"} and "with_taps" not in without
