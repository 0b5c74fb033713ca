"""A real model: its draft trained on the device, and the pair's speed and acceptance with a fixed k
and with `--k auto` beside no draft, as it is and padded to a larger model's price. The engines take
turns, as in scripts/bench_auto."""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from draftsmith import config as configuration
from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.commands.table import COMMANDS, load
from draftsmith.drafters.target.load import load_model, load_tokenizer
from draftsmith.drafters.target.target import SAME_AS, Target, revision_of
from draftsmith.serve.bench.prompts import read_prompts
from draftsmith.serve.sampling.params import SamplingParams
from scripts.bench.device.machine import Machine
from scripts.bench.device.report import Report
from scripts.bench.engine.auto import AUTO, NONE, Player, measure, players, table
from scripts.demo.pad_target import number, pad

K = 3
FULL = argparse.Namespace(streams=(1, 8), prompts=16, max_tokens=128, repeats=2, prompt_tokens=512)
TINY = argparse.Namespace(streams=(1, 2), prompts=2, max_tokens=4, repeats=1, prompt_tokens=16)
# Of a draft that has minutes on a device: whole texts, the vocabulary that pays at this size.
TRAINING = ("batch_size=32", "max_length=1024", "optim.lr=1e-3", "log_every=50", "eval_prompts=0")
LARGEST_FILE = 15 << 20  # bytes that come back in one file


def train(report: Report, item: str, options: argparse.Namespace, seconds: float) -> None:
    """A draft in `options.out`/draft from answers that `draftsmith generate` has left in a folder,
    evaluated on those held out. It is the one of later items."""
    need(options, "model", "answers")
    draft = options.out / "draft"
    vocabulary = "eagle3.draft_vocab_size=" + ("64" if options.tiny else "8192")
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
    found = json.loads(evaluated.read_text(encoding="utf-8"))["evaluation"]
    report.note(item, evaluation=found, parts=cut(draft))
    options.draft = options.draft or draft


def need(options: argparse.Namespace, *names: str) -> None:
    if absent := [f"--{name}" for name in names if getattr(options, name) is None]:
        raise ValueError(f"left out: give {' and '.join(absent)}")


def command(name: str, *arguments: object) -> None:
    """A command in this process, whatever its extra lacks: a borrowed machine has not everything."""
    cls = load(COMMANDS[name].config)
    found = parse(parser_for(name, cls), list(map(str, arguments)))
    status = load(COMMANDS[name].run)(configuration.build(cls, collect(cls, found)))
    if status:
        raise RuntimeError(f"{name} ended with status {status}")


def cut(folder: Path) -> list[str]:
    """Names of the pieces of weights that are too large to come back; `cat` joins them."""
    names = []
    for path in sorted(folder.glob("*.safetensors")):
        if path.stat().st_size <= LARGEST_FILE:
            continue
        data = path.read_bytes()
        for index, begin in enumerate(range(0, len(data), LARGEST_FILE)):
            piece = folder / f"{path.name}.{index}"
            piece.write_bytes(data[begin : begin + LARGEST_FILE])
            names.append(piece.name)
    return names


def pair(
    report: Report, item: str, machine: Machine, options: argparse.Namespace, parameters: str | None
) -> None:
    """`parameters`: that the target is padded to; None: as it is."""
    need(options, "model", "draft")
    work = TINY if options.tiny else FULL
    target = partial(loaded, options.model, parameters, machine.device)
    found = players(target, Path(options.draft), [K], only=(NONE, f"k = {K}", AUTO))
    prompts = prompts_of(options, work)
    report.note(item, parameters=parameters, same_greedy=same(found, prompts, work.max_tokens))
    rows: list[dict[str, Any]] = []
    for temperature in (0.0, 1.0):
        for streams in work.streams:
            rows += measure(found, prompts[: max(8, streams)], work, temperature, streams)
            print("\n".join(table(rows[-3:])), flush=True)
            report.note(item, rows=rows)


def loaded(model: str, parameters: str | None, device: torch.device) -> Target:
    """Made on its device, in bfloat16 there and in float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if parameters is None:
        return Target.load(model, dtype=dtype, device=device)
    source = load_model(model, trust_remote_code=False, dtype=dtype, device=device)
    with device:
        padded = pad(source, number(parameters)).eval()
    setattr(padded.config, SAME_AS, revision_of(source))
    return Target(padded, model)


def prompts_of(options: argparse.Namespace, work: argparse.Namespace) -> list[list[int]]:
    """As the target reads them: a chat by its template."""
    tokenizer = load_tokenizer(options.model, trust_remote_code=False)
    read = read_prompts(options.prompts, count=work.prompts, chars=1000, seed=0)
    found = []
    for row in islice(read, work.prompts):
        chat = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        ids = (
            tokenizer(row["prompt"])["input_ids"]
            if tokenizer.chat_template is None
            else tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
        found.append(list(ids)[: work.prompt_tokens])
    return found


def same(found: dict[str, Player], prompts: list[list[int]], num_tokens: int) -> dict[str, float]:
    """Share of the greedy answers, each engine's over those without a draft, one at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    answers: dict[str, list[list[int]]] = {}
    for name, player in found.items():
        answers[name] = []
        for prompt in prompts:
            request = player.engine.submit(prompt, params)
            while player.engine.scheduler.busy:
                player.engine.step()
            answers[name].append(list(request.tokens))
    return {
        name: sum(one == none for one, none in zip(given, answers[NONE])) / len(prompts)
        for name, given in answers.items()
    }
