"""The shipped target, padded, and its EAGLE-3 draft, trained on its answers: speed with a fixed k and
with `--k auto` over no draft, and greedy answers beside those without a draft. The engines take
turns, as in scripts/bench_auto."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import torch

from draftsmith.drafters.target.load import load_model
from draftsmith.drafters.target.target import SAME_AS, Target, revision_of
from draftsmith.files import write_json
from draftsmith.serve.bench.prompts import read_prompts
from draftsmith.serve.sampling.params import SamplingParams
from scripts.bench.device.shapes import device_of, stage_parser
from scripts.bench.engine.auto import AUTO, NONE, Player, measure, players, table
from scripts.demo.pad_target import number, pad
from scripts.paths import ROOT

TARGET, DRAFT = ROOT / "scripts" / "quickstart_target", ROOT / "scripts" / "quickstart_draft"
PARAMETERS = {"tiny": "8M", "1b": "1B", "8b": "8B"}
FULL = argparse.Namespace(
    streams=(1, 8, 32), prompts=32, prompt_tokens=48, max_tokens=128, repeats=2
)
FEW = 8  # prompts of one stream, and of greedy answers that are compared
TINY = argparse.Namespace(streams=(2,), prompts=2, prompt_tokens=8, max_tokens=4, repeats=1)


def main(arguments: list[str] | None = None) -> int:
    options = stage_parser("pair", __doc__).parse_args(arguments)
    work, device = TINY if options.dry_run else FULL, device_of(options)
    read = read_prompts("stdlib:code", count=work.prompts, chars=1000, seed=0)
    report: dict[str, Any] = {"schema": 1, "parameters": PARAMETERS[options.size], "rows": []}
    load_target = partial(padded, PARAMETERS[options.size], device)
    found = players(load_target, DRAFT, [3], only=(NONE, "k = 3", AUTO))
    tokenizer = found[NONE].engine.target.tokenizer()
    prompts = [tokenizer(one["prompt"])["input_ids"][: work.prompt_tokens] for one in read]
    report["same_greedy_answers"] = same(found, prompts[:FEW], work.max_tokens)
    print("greedy answers that are those without a draft:", report["same_greedy_answers"])
    for temperature in (0.0, 1.0):
        for streams in work.streams:
            rows = measure(found, prompts[: max(FEW, streams)], work, temperature, streams)
            report["rows"] += rows
            print("\n".join(table(rows)), flush=True)
            write_json(options.out, report)
    return 0


def padded(parameters: str, device: torch.device) -> Target:
    """Made on its device, in bfloat16 there and in float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = load_model(TARGET, trust_remote_code=False, dtype=dtype, device=device)
    with device:
        model = pad(source, number(parameters)).eval()
    setattr(model.config, SAME_AS, revision_of(source))
    return Target(model, str(TARGET))


def same(found: dict[str, Player], prompts: list[list[int]], num_tokens: int) -> dict[str, float]:
    """Share of the answers, each engine's over those without a draft, prompts one at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
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


if __name__ == "__main__":
    sys.exit(main())
