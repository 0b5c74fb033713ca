"""A real model's draft, trained on the device."""

from __future__ import annotations

import argparse
import json

from draftsmith import config as configuration
from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.commands.table import COMMANDS, load
from scripts.bench.device.report import Report

K = 3
# Of a draft that has minutes on a device: whole texts, the vocabulary that pays at this size.
TRAINING = ("batch_size=32", "max_length=1024", "optim.lr=1e-3", "log_every=50", "eval_prompts=0")


def train(report: Report, item: str, options: argparse.Namespace, seconds: float) -> None:
    """A draft in `options.out`/draft from answers that `draftsmith generate` has left in a folder,
    evaluated on those held out."""
    if options.model is None or options.answers is None:
        raise ValueError("left out: give --model and --answers")
    draft = options.out / "draft"
    vocabulary = "draft.draft_vocab_size=" + ("64" if options.tiny else "8192")
    limit = ["--steps", "3"] if options.tiny else ["--minutes", f"{seconds * 0.75 / 60:.2f}"]
    command(
        "train", "eagle3", "--target", options.model, "--data", options.answers, "--out", draft,
        *limit, *(() if options.tiny else TRAINING), vocabulary,
    )  # fmt: skip
    evaluated = options.out / "draft-eval.json"
    command(
        "eval", "--target", options.model, "--draft", draft, "--data", options.answers,
        "--k", str(K), "--out", evaluated, "--prompts", "4" if options.tiny else "64",
    )  # fmt: skip
    report.note(item, evaluation=json.loads(evaluated.read_text(encoding="utf-8"))["evaluation"])


def command(name: str, *arguments: object) -> None:
    """A command in this process, whatever its extra lacks: a borrowed machine has not everything."""
    cls = load(COMMANDS[name].config)
    found = parse(parser_for(name, cls), list(map(str, arguments)))
    status = load(COMMANDS[name].run)(configuration.build(cls, collect(cls, found)))
    if status:
        raise RuntimeError(f"{name} ended with status {status}")
