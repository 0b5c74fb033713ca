"""Tokens of an EAGLE-3 draft that vLLM accepts, greedily: another engine checks our evaluator. Part
of scripts/bench_drafters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.files import write_json
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.command import prompt_of
from scripts.paths import ROOT

# The one that the end-to-end tests run in vLLM's interpreter.
PROBE = ROOT / "tests" / "e2e" / "vllm_probe.py"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": (
        "1"
    ),
}  # fmt: skip


def exported(draft: Path, target: Path, out: Path) -> Path:
    """Our folder as vLLM reads it; speculators' is in a layout of vLLM's own."""
    command = [
        sys.executable,
        "-m",
        "draftsmith.cli",
        "export",
        draft,
        "--to",
        "vllm",
        "--target",
        target,
        "--out",
        out,
    ]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    return out


def served_tau(
    python: str, draft: Path, target: Path, answers: Sequence[TokenSequence], k: int, out: Path
) -> dict[str, Any]:
    """`answers` are the target's greedy ones; vLLM writes them again with the draft."""
    job = {
        "model": str(target), "prompts": [prompt_of(answer).tolist() for answer in answers],
        "max_tokens": max(int(answer.loss_mask.sum()) for answer in answers),
        "max_model_len": max(len(answer.input_ids) for answer in answers) + k + 1,
        "speculative": {"method": "eagle3", "model": str(draft), "num_speculative_tokens": k},
        "out": str(out / "vllm.json"),
    }  # fmt: skip
    write_json(out / "job.json", job)
    with open(out / "log.txt", "w", encoding="utf-8") as log:
        done = subprocess.run(
            [python, PROBE, out / "job.json"], stdout=log, stderr=log, env=os.environ | SETTINGS
        )
    if done.returncode != 0:
        sys.exit(
            f"bench_drafters: vLLM failed with status {done.returncode}; see {out / 'log.txt'}"
        )
    found = json.loads((out / "vllm.json").read_text(encoding="utf-8"))
    return {"vllm_tau": 1 + found["accepted"] / found["rounds"], "rounds": found["rounds"]}
