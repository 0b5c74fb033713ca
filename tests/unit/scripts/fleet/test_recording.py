"""`scripts/bench_fleet recording` over stand-ins of the three servers."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from scripts.bench.fleet import recording
from scripts.bench.serving.systems import Load, Pass, Workload

RECORDER = {
    "engine_thread_share": 0.02, "dropped_requests": 0, "requests": 8, "text_only_steps": 0,
    "writer": {"versions": {"1": {"alpha": 0.5, "tau": 1.8, "z": 0.3}}},
}  # fmt: skip


class Server:
    """Answers at a speed of its own, and keeps how many prompts each pass had."""

    def __init__(self, tokens_per_s: float):
        self.tokens_per_s, self.passes = tokens_per_s, []  # type: ignore[var-annotated]

    def run(self, load: Load, work: Workload) -> Pass:
        count = len(load.of(work.streams))
        self.passes.append(count)
        return Pass(count * load.max_tokens, count * load.max_tokens / self.tokens_per_s)


def test_pairs_are_of_whole_passes_over_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    systems = {
        recording.OFF: Server(100), recording.AGAIN: Server(101), recording.ON: Server(90),
    }  # fmt: skip
    monkeypatch.setattr(recording, "servers", lambda *given: systems)
    monkeypatch.setattr(
        recording, "prompts_of", lambda chosen, folder: [{"prompt": "a"}] * chosen.prompts
    )
    figures: dict[str, Any] = {"recorder": RECORDER, "bytes_per_reached_position": 400.0}
    monkeypatch.setattr(recording, "records_of", lambda system, buffer: figures)
    parser = argparse.ArgumentParser()
    recording.add_options(parser)
    chosen = parser.parse_args(["--pairs", "3", "--prompts", "24", "--streams", "4"])
    found = recording.run(chosen, "python")
    assert found["median_ratio"] == pytest.approx({recording.AGAIN: 1.01, recording.ON: 0.9})
    assert all(len(found["tokens_per_s"][name]) == 3 for name in systems)
    # One pass that does not count, then the pairs.
    assert all(server.passes == [24] * 4 for server in systems.values())
