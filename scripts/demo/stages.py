"""The quickstart's stages, each one a command that a user would type. Started by
scripts/quickstart."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file, save_file

from draftsmith.progress import duration
from scripts.demo.report import write_report
from scripts.demo.traffic import Shift, serve_shift, write_bench_prompts
from scripts.paths import ROOT

RUN = ROOT / "runs" / "quickstart"
SHIPPED_TARGET = ROOT / "scripts" / "quickstart_target"
COMMAND = [sys.executable, "-m", "draftsmith.cli"]
K = 3
TRAIN_MINUTES = 4.0


def draftsmith(*arguments: str | Path) -> None:
    words = [str(argument) for argument in arguments]
    shown = [word.replace(str(ROOT) + "/", "") for word in words]
    print("  $ draftsmith " + " ".join(shown), flush=True)
    subprocess.run([*COMMAND, *words], check=True)


class Stage(NamedTuple):
    name: str
    summary: str
    seconds: float  # expected
    work: Callable[[], None]


@dataclass
class Clock:
    """Says which stage runs and how long is left; remembers finished stages so that a second start
    skips them."""

    stages: list[Stage]
    begun_s: float = field(
        default_factory=lambda: float(os.environ.get("QUICKSTART_BEGUN", time.time()))
    )

    def run(self) -> None:
        expected_s = sum(
            stage.seconds for stage in self.stages if not self.marker(stage.name).exists()
        )
        print(
            f"quickstart: about {duration(expected_s)} of work, everything under runs/quickstart",
            flush=True,
        )
        for number, (name, summary, stage_s, work) in enumerate(self.stages, start=1):
            label = f"[{number}/{len(self.stages)}] {summary}"
            if self.marker(name).exists():
                print(f"{label}: kept from an earlier run", flush=True)
                continue
            left = f"about {duration(stage_s)}; the whole about {duration(expected_s)} more"
            print(
                f"\n{label} ({left}; {duration(time.time() - self.begun_s)} since the start)",
                flush=True,
            )
            stage_begun_s = time.time()
            work()
            expected_s -= stage_s
            self.marker(name).parent.mkdir(parents=True, exist_ok=True)
            self.marker(name).write_text(
                json.dumps({"seconds": round(time.time() - stage_begun_s, 1)}) + "\n",
                encoding="utf-8",
            )
        print(f"\nquickstart: {duration(time.time() - self.begun_s)} since the start", flush=True)

    def marker(self, name: str) -> Path:
        return RUN / "finished" / f"{name}.json"


def make_target(train: bool) -> None:
    source = SHIPPED_TARGET
    if train:
        source = RUN / "trained-target"
        script = [
            sys.executable,
            "-m",
            "scripts.demo.train_target",
            "--out",
            source,
            "--minutes",
            str(TRAIN_MINUTES),
        ]
        subprocess.run(script, check=True, cwd=ROOT)
    unpack(source, RUN / "target")
    record = json.loads((RUN / "target" / "training.json").read_text(encoding="utf-8"))
    print(f"  {record['parameters']:,} parameters, made by: {record['command']}")


def unpack(source: Path, target: Path) -> None:
    """Shipped in bfloat16 to be small; served in float32, which CPUs are faster at and greedy
    comparisons are exact in."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    weights = load_file(target / "model.safetensors")
    save_file(
        {name: tensor.float() for name, tensor in weights.items()},
        target / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(
        json.dumps(config | {"dtype": "float32"}, indent=2) + "\n", encoding="utf-8"
    )


def generate() -> None:
    draftsmith(
        "generate", "--target", RUN / "target", "--prompts", "stdlib:code", "--split", "all",
        "--count", "1080",
        "--prompt-tokens", "48", "--max-tokens", "112", "--temperature", "1", "--batch", "48",
        "--seed", "1",
        "--out", RUN / "data",
    )  # fmt: skip


def train(family: str, minutes: float) -> None:
    draftsmith(
        "train", family, "--target", RUN / "target", "--data", RUN / "data", "--out", RUN / family,
        "--minutes", str(minutes), ROOT / "recipes" / f"{family}-small.yaml",
    )  # fmt: skip


def evaluate(family: str) -> None:
    draftsmith(
        "eval", "--target", RUN / "target", "--draft", RUN / family, "--data", RUN / "data",
        "--held-out", "0.05",
        "--prompts", "40", "--max-tokens", "96", "--k", str(K), "--store", "--out",
        RUN / f"eval-{family}.json",
    )  # fmt: skip


def bench(name: str, *drafter: str | Path) -> None:
    draftsmith(
        "bench", "--target", RUN / "target", *drafter, "--prompts", RUN / "bench-prompts.jsonl",
        "--num-prompts", "6",
        "--max-tokens", "96", "--temperature", "0", "1", "--k", str(K), "--repeats", "2", "--out",
        RUN / f"bench-{name}.json",
    )  # fmt: skip


def learn() -> None:
    for leftover in ("buffer", "versions"):
        shutil.rmtree(RUN / leftover, ignore_errors=True)
    shift = Shift(target=RUN / "target", draft=RUN / "eagle3", folder=RUN, k=K)
    serve_shift(shift, COMMAND)


def export() -> None:
    draftsmith(
        "export",
        RUN / "eagle3",
        "--to",
        "vllm",
        "--target",
        RUN / "target",
        "--out",
        RUN / "export" / "eagle3",
    )
    draftsmith(
        "export",
        RUN / "draft-lm",
        "--to",
        "hf",
        "--target",
        RUN / "target",
        "--out",
        RUN / "export" / "draft-lm",
    )


def evaluate_all() -> None:
    for family in ("eagle3", "draft-lm"):
        evaluate(family)


def bench_all() -> None:
    write_bench_prompts(RUN / "target", RUN / "bench-prompts.jsonl")
    bench("eagle3", "--draft", RUN / "eagle3")
    bench("draft-lm", "--draft", RUN / "draft-lm")
    bench("ngram", "--ngram")


def stages(train_target: bool) -> list[Stage]:
    make = Stage("target", "take the shipped target", 5, lambda: make_target(train=False))
    if train_target:
        make = Stage(
            "target", "train the tokenizer and the target", 280, lambda: make_target(train=True)
        )
    return [
        make,
        Stage("generate", "the target answers 1080 code prompts", 60, generate),
        Stage("eagle3", "train an EAGLE-3 draft on the answers", 130, lambda: train("eagle3", 1.9)),
        Stage(
            "draft-lm",
            "train a small draft model on the same answers",
            70,
            lambda: train("draft-lm", 1.0),
        ),
        Stage("eval", "predict alpha and tau of both drafts, offline", 40, evaluate_all),
        Stage("bench", "tok/s with speculation off and on", 60, bench_all),
        Stage("learn", "serve code, then prose: a static draft and a learning one", 240, learn),
        Stage("export", "export both drafts", 10, export),
        Stage("report", "the table and the picture", 5, lambda: write_report(RUN)),
    ]


REAL_COMMANDS = """
The same on a GPU, for a model from the Hub:

  draftsmith generate --target Qwen/Qwen3-8B --prompts HuggingFaceH4/ultrachat_200k --prompts-split train_sft \\
      --count 50000 --max-tokens 1024 --out data
  draftsmith train eagle3 --target Qwen/Qwen3-8B --data data --out draft recipes/eagle3-8b.yaml
  draftsmith serve --target Qwen/Qwen3-8B --draft draft --learn buffer --versions versions
  draftsmith distill --target Qwen/Qwen3-8B --draft draft --buffer buffer --versions versions
  draftsmith export draft --to vllm --out Qwen3-8B-eagle3 --push you/Qwen3-8B-eagle3
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart", description="The whole loop on this machine, on real text."
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs and start over")
    parser.add_argument(
        "--train-target",
        action="store_true",
        help="train the tokenizer and the target instead of taking the shipped ones",
    )
    arguments = parser.parse_args()
    if arguments.fresh or (
        arguments.train_target and not (RUN / "finished" / "trained-target").exists()
    ):
        shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True, exist_ok=True)
    if arguments.train_target:
        (RUN / "finished").mkdir(exist_ok=True)
        (RUN / "finished" / "trained-target").touch()
    try:
        Clock(stages(arguments.train_target)).run()
    except subprocess.CalledProcessError as error:
        command = " ".join(str(word) for word in error.cmd)
        sys.exit(
            f"quickstart: this command failed with status {error.returncode}: {command}; mend it "
            "and start again"
        )
    print((RUN / "report.txt").read_text(encoding="utf-8"))
    print(REAL_COMMANDS)


if __name__ == "__main__":
    main()
