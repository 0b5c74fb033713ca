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

from draftsmith.drafters.layouts import demo
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.progress import duration
from draftsmith.prompts.published import SUITES
from draftsmith.prompts.suites import files_of
from scripts.demo import ship_draft
from scripts.demo.commands import RUN, Words, draftsmith, together
from scripts.demo.machine import Sizes, measure_pace, sizes_of
from scripts.demo.report import REAL, write_report
from scripts.demo.ship_draft import ANSWERS, DATA, OUT
from scripts.demo.shipped import SHIPPED_DRAFT, SHIPPED_TARGET, in_dtype
from scripts.demo.traffic import Shift, serve_shift
from scripts.paths import ROOT

K = 3
OWN = ("eagle3", "draft-lm")  # drafts that the run trains
GAIN = {"gain-first": "eagle3", "gain-live": "versions"}  # evaluation -> draft
CODE_REQUESTS = 24  # before the prose
DRAFT_MINUTES = 24.0  # of --train, about


class Stage(NamedTuple):
    name: str
    summary: str
    proves: str
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
        for place, stage in enumerate(self.stages, start=1):
            print(f"  {place}. {stage.summary}: {stage.proves}")
        for place, (name, summary, _, stage_s, work) in enumerate(self.stages, start=1):
            label = f"[{place}/{len(self.stages)}] {summary}"
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


def take_target() -> None:
    """Shipped in bfloat16 to be small; served in float32, which CPUs are faster at and greedy
    comparisons are exact in."""
    record = read_json(in_dtype(SHIPPED_TARGET, RUN / "target", "float32") / "training.json")
    print(f"  {record['parameters']:,} parameters, made by: {record['command']}")


def generate(count: int) -> None:
    draftsmith(
        "generate", "--target", RUN / "target", "--prompts", "stdlib:code", "--split", "all",
        "--count", str(count),
        "--prompt-tokens", "48", "--max-tokens", "112", "--temperature", "1", "--batch", "48",
        "--seed", "1",
        "--out", RUN / "data",
    )  # fmt: skip


def train_words(family: str, minutes: float) -> Words:
    return [
        "train", family, "--target", RUN / "target", "--data", RUN / "data", "--out", RUN / family,
        "--minutes", str(minutes), ROOT / "recipes" / f"{family}-small.yaml",
    ]  # fmt: skip


def train_shipped() -> None:
    """A draft in place of the one that ships, as that one was made; `scripts.demo.ship_draft`
    stores it beside the target."""
    draftsmith(*ship_draft.generate_words(RUN / "target", RUN / DATA))
    draftsmith(*ship_draft.train_words(RUN / "target", RUN / DATA, RUN / OUT))


def shipped_draft() -> Path:
    trained = RUN / OUT
    return trained if trained.exists() else SHIPPED_DRAFT


def evaluate_words(family: str) -> Words:
    return [
        "eval", "--target", RUN / "target", "--draft", RUN / family, "--data", RUN / "data",
        "--held-out", "0.05",
        "--prompts", "24", "--max-tokens", "96", "--k", str(K), "--store", "--out",
        RUN / f"eval-{family}.json",
    ]  # fmt: skip


def bench(name: str, draft: Path) -> None:
    draftsmith(
        "bench", "--target", RUN / "target", "--draft", draft, "--prompts", "stdlib:code",
        "--num-prompts", "4", "--max-tokens", "64",
        "--temperature", "0", "1", "--k", str(K), "--repeats", "2", "--max-length", "512",
        "--out", RUN / f"bench-{name}.json",
    )  # fmt: skip


def bench_real() -> None:
    """A chat model that pip fetches, on prompts from GitHub; passed over where one cannot be had."""
    try:
        demo.file()
        files_of(SUITES["spec-bench"])
    except UserError as error:
        print(f"  passed over, as no other stage needs it: {error}; --fresh tries it again")
        return
    draftsmith(
        "bench", "demo", "--suffix", "--suffix-answers", "demo", "--suite", "spec-bench", "--suite-share",
        "0.0125", "--max-tokens", "128", "--max-length", "2048", "--temperature", "0", "--repeats", "1", "--out", RUN / REAL,
    )  # fmt: skip


def learn(requests: int) -> None:
    for leftover in ("buffer", "versions"):
        shutil.rmtree(RUN / leftover, ignore_errors=True)
    shift = Shift(
        target=RUN / "target", draft=RUN / "eagle3", folder=RUN, k=K,
        code=CODE_REQUESTS, prose=requests - CODE_REQUESTS,
        # A mean over fewer steps than by default: there are few.
        learn=("learn.lr=1e-3", "learn.average=0.9"),
    )  # fmt: skip
    serve_shift(shift)


def gain() -> None:
    """Evaluates the first draft and the live one on the same prose: live requests differ too much
    from one another to show within minutes what was gained."""
    draftsmith(
        "generate", "--target", RUN / "target", "--prompts", "stdlib:prose",
        "--count", "48", "--prompt-tokens", "48", "--max-tokens", "80", "--temperature", "1",
        "--batch", "48", "--seed", "2", "--out", RUN / "prose",
    )  # fmt: skip
    together("gain", *(gain_words(name, draft) for name, draft in GAIN.items()))


def gain_words(name: str, draft: str) -> Words:
    return [
        "eval", "--target", RUN / "target", "--draft", RUN / draft, "--data", RUN / "prose",
        "--held-out", "1", "--temperature", "1", "--k", str(K), "--out", RUN / f"{name}.json",
    ]  # fmt: skip


def export_words(family: str, engine: str) -> Words:
    return [
        "export", RUN / family, "--to", engine, "--target", RUN / "target",
        "--out", RUN / "export" / family,
    ]  # fmt: skip


def bench_all() -> None:
    for name in OWN:
        bench(name, RUN / name)


def stages(train_draft: bool, sizes: Sizes) -> list[Stage]:
    train_first = Stage(
        "draft", "train a draft in place of the one that ships", "what more training is worth",
        60 * DRAFT_MINUTES + ANSWERS * sizes.second_an_answer, train_shipped,
    )  # fmt: skip
    return [
        Stage(
            "real", "tok/s of a chat model without and with drafts from text",
            "nothing need be trained where text repeats", 45, bench_real,
        ),
        Stage("target", "take the shipped target", "nothing is downloaded", 5, take_target),
        *([train_first] if train_draft else []),
        Stage(
            "speed", "tok/s without and with the shipped draft",
            "a trained draft saves passes of the target", 30,
            lambda: bench("eagle3-shipped", shipped_draft()),
        ),
        Stage(
            "generate", f"the target answers {sizes.answers} code prompts",
            "training data needs nothing but prompts", sizes.answers * sizes.second_an_answer,
            lambda: generate(sizes.answers),
        ),
        Stage(
            "train", "train an EAGLE-3 draft and a small draft model on the answers, a core each",
            "drafts for your own model, of one family or another", 60 * sizes.train_minutes + 20,
            lambda: together("train", *(train_words(family, sizes.train_minutes) for family in OWN)),
        ),
        Stage(
            "eval", "predict alpha and tau of both drafts, offline",
            "acceptance is known before anything is served", 15,
            lambda: together("eval", *map(evaluate_words, OWN)),
        ),
        Stage(
            "bench", "tok/s with the drafts of this run",
            "what minutes of training are worth", 60, bench_all,
        ),
        Stage(
            "learn", "serve code, then prose, while the draft learns from it",
            "better versions are swapped in, and no request is dropped",
            25 + sizes.requests * sizes.second_a_request, lambda: learn(sizes.requests),
        ),
        Stage(
            "gain", "the first draft and the live one on other prose",
            "a draft that learns from its traffic recovers from a shift", 20, gain,
        ),
        Stage(
            "export", "export both drafts", "other engines load them", 8,
            lambda: together("export", export_words("eagle3", "vllm"), export_words("draft-lm", "hf")),
        ),
        Stage(
            "report", "the tables", "all of it at a glance", 3,
            lambda: write_report(RUN),
        ),
    ]  # fmt: skip


REAL_COMMANDS = """
The same on a GPU, for a model from the Hub:

  draftsmith generate Qwen/Qwen3-8B --prompts HuggingFaceH4/ultrachat_200k --prompts-split train_sft \\
      --count 50000 --max-tokens 1024 --out data
  draftsmith train eagle3 Qwen/Qwen3-8B --data data --out draft recipes/eagle3-8b.yaml
  draftsmith serve Qwen/Qwen3-8B --draft draft --learn buffer --versions versions
  draftsmith distill Qwen/Qwen3-8B --draft draft --buffer buffer --versions versions
  draftsmith export draft --to vllm --out Qwen3-8B-eagle3 --push you/Qwen3-8B-eagle3
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart", description="The whole loop on this machine, on real text."
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs and start over")
    parser.add_argument(
        "--train",
        action="store_true",
        help="train a draft for 24 minutes in place of the one that ships beside the target",
    )
    arguments = parser.parse_args()
    if arguments.fresh:
        shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True, exist_ok=True)
    pace = measure_pace(SHIPPED_TARGET)
    print(f"quickstart: this machine runs at {pace:.2f} of the pace that the stages are made for")
    try:
        Clock(stages(arguments.train, sizes_of(pace))).run()
    except subprocess.CalledProcessError as error:
        command = " ".join(str(word) for word in error.cmd)
        sys.exit(
            f"quickstart: this command failed with status {error.returncode}: {command}; mend it "
            "and start again"
        )
    except UserError as error:
        sys.exit(f"quickstart: {error}")
    print((RUN / "report.txt").read_text(encoding="utf-8"))
    print("the same with plots: runs/quickstart/report.html")
    print(REAL_COMMANDS)


if __name__ == "__main__":
    main()
