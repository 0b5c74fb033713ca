"""The whole loop over unmodified engines: several vLLM, one learner, one publisher and a store,
while traffic turns from code to prose. Requests that failed, texts against those of the clients,
versions, swaps, acceptance and losslessness, all from the records and from the store. Then the same
prompts go to draftsmith's own engine with a learner of its own, for acceptance side by side."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from draftsmith.distill.monitor.audit import look
from draftsmith.drafters.published import versions
from draftsmith.fleet.store.engine_status import EngineStatus
from draftsmith.fleet.store.store import VersionStore
from scripts.bench.fleet import own, verdict
from scripts.bench.fleet.answers import acceptance, recorded, send, texts_of
from scripts.bench.fleet.installed import variables
from scripts.bench.fleet.places import Place, place_of
from scripts.bench.fleet.statuses import Statuses
from scripts.bench.serving.peers import vllm_server
from scripts.bench.serving.systems import awake
from scripts.demo.traffic import Shift, process, traffic

PATIENCE_S = 900.0
# For all engines to serve the live version.
SETTLE_S = 120.0
COMMAND = [sys.executable, "-m", "draftsmith.cli"]
METHODS = {"eagle3": "eagle3", "draft-lm": "draft_model"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", default="eagle3", choices=tuple(METHODS))
    parser.add_argument("--k", type=int, default=3, help="draft tokens per round")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument(
        "--store", default="folder", choices=("folder", "s3"), help="of versions and records"
    )
    parser.add_argument("--code", type=int, default=60, help="requests before the shift")
    parser.add_argument("--prose", type=int, default=600, help="requests after it")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7, help="of the prompts")
    parser.add_argument(
        "--no-own", dest="own", action="store_false",
        help="leave out draftsmith's own engine over the same prompts",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="12 and 40 requests of 24 tokens")


def run(chosen: argparse.Namespace, python: str) -> dict[str, Any]:
    if chosen.quick:
        chosen.code, chosen.prose, chosen.max_tokens = 12, 40, 24
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shift = Shift(
            chosen.run / "target", draft_of(chosen), folder, chosen.k, code=chosen.code,
            prose=chosen.prose, max_tokens=chosen.max_tokens, clients=chosen.clients,
            seed=chosen.seed,
        )  # fmt: skip
        prompts = traffic(shift)
        try:
            with ExitStack() as stack:
                figures = over_engines(stack, shift, prompts, chosen, python)
            if chosen.own:
                figures["own"] = own.measured(shift, prompts, COMMAND)
        finally:
            keep_logs(folder, chosen)
    figures["broken"] = list(verdict.of_loop(figures))
    report(figures)
    return figures


def over_engines(
    stack: ExitStack,
    shift: Shift,
    prompts: list[list[int]],
    chosen: argparse.Namespace,
    python: str,
) -> dict[str, Any]:
    """Figures of the whole fleet over the prompts; `stack` ends its parts."""
    folder = shift.folder
    place = stack.enter_context(place_of(chosen.store, folder))
    store = VersionStore(place.url("store"), cache=folder / "first")
    stack.enter_context(process(learner(shift, place), folder / "distill.log"))
    until(lambda: versions.latest(folder / "versions"), "the learner's first version")
    stack.enter_context(process(publisher(shift, place), folder / "publish.log"))
    first = store.fetch(until(store.current, "the first version in the store"), "vllm")
    engines = [
        stack.enter_context(engine(index, chosen, python, folder, place, first))
        for index in range(chosen.engines)
    ]
    statuses = Statuses(store)
    begun_s = time.monotonic()
    answers = send(shift, engines, prompts, lambda name: named(shift, name))
    wall_s = time.monotonic() - begun_s
    done = [answer for answer in answers if answer is not None]
    records = recorded(place.url("buffer"), len(done))
    live, served = settled(store)
    statuses.close()
    return {
        "seconds": wall_s,
        "requests": len(prompts),
        "failed": len(prompts) - len(done),
        **texts_of(done, records),
        **acceptance(done, records),
        **losslessness(place.url("buffer")),
        "versions": versions.versions(folder / "versions"),
        "live": live,
        "engines": [status_of(one) for one in served],
        "swaps": statuses.swaps(),
        "recording": [recording_of(url) for url in engines],
    }


def named(shift: Shift, class_name: str) -> dict[str, Any]:
    """Fields of the model for vLLM, and of a request's class for its plugin."""
    return {"model": str(shift.target), "vllm_xargs": {"draftsmith_class": class_name}}


def draft_of(chosen: argparse.Namespace) -> Path:
    """Checkpoint from which the learner begins: the quickstart's."""
    return chosen.run / chosen.draft


def learner(shift: Shift, place: Place) -> list[Any]:
    """Command of the learner."""
    return [
        *COMMAND, "distill", "--target", shift.target, "--draft", shift.draft,
        "--buffer", place.url("buffer"), "--versions", shift.folder / "versions",
        "--threads", 1, "learn.lr=1e-3", f"learn.unroll.steps={shift.k}",
    ]  # fmt: skip


def publisher(shift: Shift, place: Place) -> list[Any]:
    """Command of the publisher."""
    return [
        *COMMAND, "fleet", "publish", "--versions", shift.folder / "versions", "--to",
        place.url("store"), "--layouts", "vllm", "--target", shift.target,
    ]  # fmt: skip


def engine_options(
    index: int, chosen: argparse.Namespace, folder: Path, place: Place, first: Path
) -> list[str]:
    """Options of a vLLM that begins with the draft in `first`, follows the store and records."""
    speculative = {
        "method": METHODS[chosen.draft],
        "model": str(first),
        "num_speculative_tokens": chosen.k,
        "draft_sample_method": "probabilistic",
    }
    settings = {
        "buffer": place.url("buffer"),
        "versions": place.url("store"),
        "engine": f"engine-{index + 1}",
        "cache": str(folder / f"cache-{index + 1}"),
        "poll_s": 1.0,
        "mend_expand_kernel": True,
    }
    return [
        *("--speculative-config", json.dumps(speculative)),
        *("--additional-config", json.dumps({"draftsmith": settings})),
    ]


@contextmanager
def engine(
    index: int, chosen: argparse.Namespace, python: str, folder: Path, place: Place, first: Path
) -> Iterator[str]:
    """A running vLLM of the fleet; its URL."""
    options = engine_options(index, chosen, folder, place, first)
    where = variables(folder / "installed", place.path)
    with (
        vllm_server(python, chosen.run / "target", options, variables=where) as (url, group),
        awake(group),
    ):
        yield url


def until(holds: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        found = holds()
        if found:
            return found
        if time.monotonic() > deadline_s:
            sys.exit(f"bench_fleet: {what} did not come within {PATIENCE_S:.0f} s")
        time.sleep(0.5)


def losslessness(buffer: str) -> dict[str, Any]:
    """z of each event over all records, as `draftsmith audit --buffer` has it."""
    everything = look(buffer, false_alarm=1e-6).monitor.everything
    return {
        "z": {name: counts.z for name, counts in everything.counts.items()},
        "violations": everything.violations,
    }


def settled(store: VersionStore) -> tuple[int | None, list[EngineStatus]]:
    """Live version and statuses, once all engines serve it or `SETTLE_S` have passed. The learner
    goes on, so that the live version may change once more."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        time.sleep(2)  # for statuses of after the last answer
        served, live = store.engines(), store.current()
        if {one.version for one in served} == {live} or time.monotonic() > deadline_s:
            return live, served


def status_of(one: EngineStatus) -> dict[str, Any]:
    return {
        "engine": one.engine, "version": one.version, "alpha": one.alpha, "tau": one.tau,
        "z": one.z, "last_swap": dict(one.last_swap), "refused": dict(one.refused),
    }  # fmt: skip


def recording_of(url: str) -> dict[str, Any]:
    """Share of an engine's steps that recording takes, and counts of what it left out."""
    status = httpx.get(f"{url}/draftsmith/status", timeout=60).raise_for_status().json()
    own = status["workers"][0]["records"]
    names = ("engine_thread_share", "requests", "dropped_requests", "text_only_steps", "errors")
    return {"engine": status["engine"], **{name: own[name] for name in names}}


def keep_logs(folder: Path, chosen: argparse.Namespace) -> None:
    """Logs of all parts beside the JSON file."""
    if chosen.out is not None:
        for log in [*folder.glob("*.log"), *folder.glob("own/*.log")]:
            name = "-".join(log.relative_to(folder).parts)
            shutil.copy(log, chosen.out.parent / f"{chosen.out.stem}-{name}")


def report(figures: dict[str, Any]) -> None:
    print(
        f"\n{figures['requests']} requests in {figures['seconds']:.0f} s, {figures['failed']} "
        f"failed; {figures['recorded']} recorded, {figures['equal_texts']} texts equal to those "
        "of the clients"
    )
    print(f"code: {sentence(figures['code'])}")
    for name, one in figures["prose"].items():
        print(f"prose, version {name or '?'}: {sentence(one)}")
    print(f"prose, last quarter: {sentence(figures['last_quarter'])}")
    z = ", ".join(f"{name} {value:.2f}" for name, value in figures["z"].items())
    print(f"losslessness: z {z}; {figures['violations']} violations")
    for one in figures["engines"]:
        print(
            f"{one['engine']}: version {one['version']}, last swap {one['last_swap']}, refused "
            f"{one['refused']}"
        )

    report_swaps(figures["swaps"])
    for one in figures["recording"]:
        print(
            f"{one['engine']}: recording took {one['engine_thread_share']:.2%} of its steps' time; "
            f"{one['requests']} requests, {one['dropped_requests']} of them dropped, "
            f"{one['errors']} errors"
        )
    if beside := figures.get("own"):
        print("\n".join(["", *own.table(figures, beside)]))


def report_swaps(swaps: dict[str, dict[str, Any]]) -> None:
    for engine, one in swaps.items():
        print(
            f"{engine}: {one['swaps']} swaps seen, pause {one['median_ms']:.2f} ms in the median, "
            f"{one['longest_ms']:.2f} ms at most"
        )


def sentence(one: dict[str, float]) -> str:
    return f"alpha {one['alpha']:.3f}, tau {one['tau']:.3f} over {one['rounds']:.0f} rounds"
