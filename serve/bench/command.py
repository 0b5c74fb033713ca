"""`draftsmith bench`: speed and acceptance over HTTP, speculation off and on taking turns, against
a running server or one started for the time of the measurement."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx

from draftsmith import files
from draftsmith.client import with_key
from draftsmith.config import check_limits, command_line, without_login
from draftsmith.drafters.config import check_draft_options
from draftsmith.drafters.layouts.hub import check_named
from draftsmith.drafters.tree_shape import parse_tree
from draftsmith.errors import UserError
from draftsmith.kernels.acceptance import DraftCost
from draftsmith.progress import Progress, awaited, say
from draftsmith.prompts.suites import Asked, Question, check_suite, most_tokens, read_suite
from draftsmith.serve.bench.client import Client, PassResult, Prompt, TimedAnswer, read_prompts
from draftsmith.serve.bench.config import BenchConfig, ServedPair
from draftsmith.serve.bench.picture import draw
from draftsmith.serve.bench.report import (
    BenchCase,
    by_task,
    cost_of,
    figures,
    markdown,
    ratios,
    speedups,
    table,
)

MODES = ("off", "on", "plain")
CHAIN = ""  # the server without trees


def run(config: BenchConfig) -> int:
    check(config)
    check_named(config)
    suite = read_suite(config) if config.suite is not None else None
    prompts = suite.questions if suite is not None else read_questions(config)
    with ExitStack() as servers:
        urls: dict[str, str] = {}
        for tree in (CHAIN, *config.tree):
            if config.url is not None:
                urls[tree] = config.url
                continue
            server = started(
                server_arguments(config, tree), timeout_s=config.timeout_s, api_key=config.api_key
            )
            urls[tree] = servers.enter_context(server)
        cases, cost = asyncio.run(measure(config, urls, prompts))
    refused = check_refused(cases)
    found = [figures(case, draft_cost=cost) for case in cases]
    shown = table(found)
    print(shown)
    record: dict[str, Any] = {
        "schema": 1, "config": _public(config), "refused": refused, "cases": found,
    }  # fmt: skip
    if suite is not None:
        for figures_, case in zip(found, cases):
            figures_["tasks"] = by_task(case)
        record |= {"suite": suite.about, "speedups": speedups(found)}
        text = markdown(found, about(config, suite))
        print(f"\n{text}", end="")
        shown += f"\n{text}"
    if config.out is not None:
        files.write_json(config.out, record | {"ratios": ratios(found)})
        page, command = files.page_of(config.out), command_line("bench", config)
        files.write_page(page, "bench", command, shown, [partial(draw, found)])
    return 0


def check_refused(cases: Sequence[BenchCase]) -> int:
    """Number of answers that the server refused, which are in no figure.

    Raises:
        UserError: it refused all of a case.
    """
    refused = [answer for case in cases for answer in _refused(case)]
    for case in cases:
        if not case.answers:
            raise UserError(f"the server refused every request: {_refused(case)[0].refused}")
    if refused:
        print(
            f"{len(refused)} requests were refused and are left out: {refused[0].refused}",
            file=sys.stderr,
        )
    return len(refused)


def _refused(case: BenchCase) -> list[TimedAnswer]:
    return [answer for one in case.passes for answer in one.answers if answer.refused]


def read_questions(config: BenchConfig) -> list[Question]:
    found = read_prompts(
        config.prompts, count=config.num_prompts, chars=config.prompt_chars, seed=config.seed
    )
    return [Question(prompt) for prompt in found]


def about(config: BenchConfig, suite: Asked) -> list[str]:
    """Lines that say what was measured."""
    pair = [
        f"target {config.target}" if config.url is None else f"server {without_login(config.url)}"
    ]
    pair += [name if value is True else f"{name} {value}"
             for name, value in pair_options(config).items()]  # fmt: skip
    pair += [] if config.k is None else [f"k {config.k}"]
    return [
        ", ".join(pair),
        f"{suite.about}; passes: {config.repeats}; a second turn's prompt holds the first's answer",
        f"answers of at most {most_tokens(config, config.max_tokens)} tokens"
        + (", all of them asked for" if _ignores_eos(config) else ", or to their end"),
    ]


def check(config: BenchConfig) -> None:
    if (config.url is None) == (config.target is None):
        raise UserError("give either url, a running server, or target, for which one is started")
    unknown = [mode for mode in config.modes if mode not in MODES]
    if unknown or not config.modes:
        raise UserError(f"modes is {config.modes}; choose from {', '.join(MODES)}")
    check_limits(config)
    check_suite(config, ("prompts", "num_prompts", "prompt_chars"))
    files.check_result(config.out, "out")
    if not config.concurrency or (config.request_rate is not None and len(config.concurrency) > 1):
        raise UserError(
            f"concurrency is {config.concurrency}; give one number or several, and with "
            "request_rate none"
        )
    check_draft_options(config)
    config.most_drafted()
    if config.target is None:
        more = ("max_length", "tree")
        of_started = [
            *pair_options(config),
            *(name for name in more if vars(config)[name] not in (None, [])),
            *(["k auto"] if config.k == "auto" else []),
        ]
        if of_started:
            raise UserError(
                f"{of_started[0]} is for a server started here; give target in place of url"
            )
    for tree in config.tree:
        parse_tree(tree)


async def measure(
    config: BenchConfig, urls: Mapping[str, str], prompts: Sequence[Prompt | Question]
) -> tuple[list[BenchCase], DraftCost | None]:
    """Passes of every case, and the cost of drafting in weights read if the server reports it.
    `urls` are those of `CHAIN` and of every tree, which is a mode of its own."""
    clients = {
        tree: Client(url, api_key=config.api_key, timeout_s=config.timeout_s)
        for tree, url in urls.items()
    }
    model = config.model or await clients[CHAIN].model()
    cases = [
        BenchCase(temperature, mode, [], concurrency)
        for concurrency in config.concurrency
        for temperature in config.temperature
        for mode in (*config.modes, *config.tree)
    ]
    run = f"bench {uuid.uuid4().hex}"  # Another run may have asked the same server.
    asked, total = 0, config.repeats * len(cases) * len(prompts)
    with closing(Progress("bench", total=total, unit="prompts")) as progress:
        for case in cases:
            # Not timed: the first request of a kind pays for caches that later ones find warm.
            await clients.get(case.mode, clients[CHAIN]).measure(
                prompts[:1], _body(config, model, case), 1
            )
        for repeat in range(config.repeats):
            for case in cases:
                case.passes.append(PassResult())
            for case, first, share in turns(config, cases, prompts, repeat):
                client = clients.get(case.mode, clients[CHAIN])
                body = _body(config, model, case)
                if "speculation" in body:
                    # No pass finds prompts in the cache that another one has paid for.
                    body["cache_salt"] = (
                        f"{run} {case.concurrency} {case.temperature} {case.mode} {repeat}"
                    )
                before = await client.scrape()
                result = await _pass(config, client, share, case, body)
                result.counted = [(await client.scrape()).since(before)]
                case.passes[-1].add(result, first)
                asked += len(share)
                speed = f"{case.passes[-1].tokens_per_s:.1f} tok/s"
                progress.update(asked, f"T = {case.temperature:g}, {case.mode}: {speed}")
    metrics = await clients[CHAIN].scrape()
    return cases, cost_of(metrics.by("draftsmith_step_bytes", "step"))


def turns(
    config: BenchConfig, cases: Sequence[BenchCase], prompts: Sequence[Any], repeat: int
) -> Iterator[tuple[BenchCase, int, Sequence[Any]]]:
    """Cases with what each is asked next, and the number of its first prompt. Modes that are
    compared take turns: with one user from prompt to prompt, else from pass to pass; every other
    time backwards, so that a drift of the machine favours none."""
    for (users, _), group in groupby(cases, key=lambda case: (case.concurrency, case.temperature)):
        modes = list(group)
        size = 1 if users == 1 and config.request_rate is None else len(prompts)
        for number, first in enumerate(range(0, len(prompts), size)):
            for case in modes if (repeat + number) % 2 == 0 else reversed(modes):
                yield case, first, prompts[first : first + size]


async def _pass(
    config: BenchConfig,
    client: Client,
    prompts: Sequence[Prompt | Question],
    case: BenchCase,
    body: dict[str, Any],
) -> PassResult:
    if config.request_rate is None:
        return await client.measure(prompts, body, case.concurrency)
    # All modes of a repeat meet the same arrivals.
    seed = config.seed + len(case.passes) - 1
    return await client.measure_open(prompts, body, gaps(config, len(prompts), seed=seed))


def gaps(config: BenchConfig, count: int, *, seed: int) -> list[float]:
    """Seconds between requests that arrive independently of each other."""
    assert config.request_rate is not None
    generator = random.Random(seed)
    return [generator.expovariate(config.request_rate) for _ in range(count)]


def _body(config: BenchConfig, model: str, case: BenchCase) -> dict[str, Any]:
    """Request body of a case, without a seed at any temperature: `--k auto` leaves sampled requests
    with a seed out of its measurements."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": most_tokens(config, config.max_tokens),
        "temperature": case.temperature,
    }
    if _ignores_eos(config):
        body["ignore_eos"] = True
    if case.mode == "off":
        body["speculation"] = {"k": 0, "report": True}
    elif case.mode == "on":
        body["speculation"] = {"report": True} | (
            {} if config.k in (None, "auto") else {"k": int(config.k)}
        )
    elif case.mode in config.tree:
        body["speculation"] = {"report": True}  # its shape sets how much is drafted
    return body


def _ignores_eos(config: BenchConfig) -> bool:
    return config.suite is None if config.ignore_eos is None else config.ignore_eos


def pair_options(config: BenchConfig) -> dict[str, Any]:
    """Options of the pair besides its target, defaults left out."""
    values = {
        field.name: (vars(config)[field.name], field.default)
        for field in fields(ServedPair)
        if field.name != "target"
    }
    return {name: value for name, (value, default) in values.items() if value != default}


def server_arguments(config: BenchConfig, tree: str = CHAIN) -> list[str]:
    arguments = ["--target", str(config.target), "--max-batch", str(max(8, *config.concurrency))]
    for name, value in pair_options(config).items():
        arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    if config.suffix:
        # An answer that an earlier pass gave is no draft.
        arguments += ["--suffix-max-cached-requests", "0"]
    if tree != CHAIN:
        arguments += ["--tree", tree]
    elif config.k is not None:
        arguments += ["--k", config.k]
    if config.max_length is not None:
        arguments += ["--max-length", str(config.max_length)]
    return arguments


def _public(config: BenchConfig) -> dict[str, Any]:
    values = {name: value for name, value in asdict(config).items() if name != "api_key"}
    return values | {"url": config.url and without_login(config.url)}


@contextmanager
def started(arguments: list[str], *, timeout_s: float, api_key: str | None = None) -> Iterator[str]:
    """URL of `draftsmith serve ARGUMENTS` on a free port, stopped afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "wb+") as log:
        command = [sys.executable, "-m", "draftsmith.cli", "serve", *arguments, "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=with_key(api_key))
        try:
            url = f"http://127.0.0.1:{port}"
            with awaited("starting a server"):
                _wait(process, url, Path(folder) / "log", timeout_s)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen, url: str, log: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    num_told, is_ready = 0, False
    while time.monotonic() < deadline_s:
        with suppress(httpx.HTTPError):
            is_ready = httpx.get(f"{url}/health", timeout=5).status_code == 200
        *lines, _ = log.read_text(encoding="utf-8", errors="replace").split("\n")
        for line in lines[num_told:]:
            if told := line.partition(" INFO draftsmith: ")[2]:
                say(told)
        num_told = len(lines)
        if is_ready:
            return
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace").strip() or "nothing"
            last = said.split("\n")[-1]
            raise UserError(f"the server did not start: {last.removeprefix('draftsmith: error: ')}")
        time.sleep(0.2)
    raise UserError(
        f"the server did not start within {timeout_s:g} s; raise timeout_s or use a smaller target"
    )
