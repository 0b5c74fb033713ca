"""The whole loop over unmodified engines: several vLLM, one learner, one publisher and a store,
while traffic turns from code to prose. Requests that failed, texts against those of the clients,
versions, swaps, acceptance and losslessness, all from the records and from the store."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from draftsmith.distill.monitor.monitor import look
from draftsmith.drafters import versions
from draftsmith.files import write_json
from draftsmith.fleet.store.layout import EngineStatus
from draftsmith.fleet.store.store import VersionStore
from scripts.bench.fleet.answers import acceptance, recorded, send, texts_of
from scripts.bench.fleet.installed import variables
from scripts.bench.serving.peers import vllm_server
from scripts.bench.serving.systems import awake
from scripts.demo.commands import Words
from scripts.demo.shipped import SHIPPED_DRAFT, SHIPPED_TARGET, in_dtype
from scripts.demo.traffic import Shift, process, traffic

PATIENCE_S = 900.0
# For all engines to serve the live version.
SETTLE_S = 120.0
# Bound of |z| of each losslessness event.
MOST_Z = 3.0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_fleet", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--k", type=int, default=3, help="draft tokens per round")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--store", help="folder or URL of versions and records, empty")
    parser.add_argument("--code", type=int, default=60, help="requests before the shift")
    parser.add_argument("--prose", type=int, default=600, help="requests after it")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7, help="of the prompts")
    parser.add_argument("--quick", action="store_true", help="12 and 40 requests of 24 tokens")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    python = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
    if not python:
        sys.exit(
            "bench_fleet: DRAFTSMITH_VLLM_PYTHON is not set; give the Python of vLLM's environment"
        )
    figures = run(chosen, python)
    if chosen.out is not None:
        setting = {key: value for key, value in vars(chosen).items() if key != "out"}
        values = {"schema": 1, "setting": setting, "cores": os.cpu_count(), "figures": figures}
        write_json(chosen.out, values)
    if broken := list(verdict(figures)):
        sys.exit("bench_fleet: " + "; ".join(broken))


def run(chosen: argparse.Namespace, python: str) -> dict[str, Any]:
    if chosen.quick:
        chosen.code, chosen.prose, chosen.max_tokens = 12, 40, 24
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        shift = Shift(
            in_dtype(SHIPPED_TARGET, folder / "target", "float32"), SHIPPED_DRAFT,
            folder, chosen.k, code=chosen.code, prose=chosen.prose,
            max_tokens=chosen.max_tokens, clients=chosen.clients, seed=chosen.seed,
        )  # fmt: skip
        figures = over_engines(stack, shift, traffic(shift), chosen, python)
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
    place = chosen.store or str(folder / "shared")
    store = VersionStore(f"{place}/store", cache=folder / "first")
    stack.enter_context(process(learner(shift, place), folder / "distill.log"))
    until(lambda: versions.latest(folder / "versions"), "the learner's first version")
    stack.enter_context(process(publisher(shift, place), folder / "publish.log"))
    first = store.fetch(until(store.current, "the first version in the store"), "vllm")
    engines = [
        stack.enter_context(engine(index, shift, python, place, first))
        for index in range(chosen.engines)
    ]
    begun_s = time.monotonic()
    answers = send(shift, engines, prompts, lambda name: named(shift, name))
    wall_s = time.monotonic() - begun_s
    done = [answer for answer in answers if answer is not None]
    records = recorded(f"{place}/buffer", len(done))
    live, served = settled(store)
    return {
        "seconds": wall_s,
        "requests": len(prompts),
        "failed": len(prompts) - len(done),
        **texts_of(done, records),
        **acceptance(done, records),
        **losslessness(f"{place}/buffer"),
        "versions": versions.versions(folder / "versions"),
        "live": live,
        "engines": [{"engine": one.engine, "version": one.version} for one in served],
    }


def named(shift: Shift, class_name: str) -> dict[str, Any]:
    """Fields of the model for vLLM, and of a request's class for its plugin."""
    return {"model": str(shift.target), "vllm_xargs": {"draftsmith_class": class_name}}


def learner(shift: Shift, place: str) -> Words:
    """Command of the learner."""
    return [
        "distill", "--target", shift.target, "--draft", shift.draft,
        "--buffer", f"{place}/buffer", "--versions", shift.folder / "versions",
        "--threads", "1", "learn.lr=1e-3", f"learn.unroll.steps={shift.k}",
    ]  # fmt: skip


def publisher(shift: Shift, place: str) -> Words:
    """Command of the publisher."""
    return [
        "fleet", "publish", "--versions", shift.folder / "versions", "--to",
        f"{place}/store", "--layouts", "vllm", "--target", shift.target,
    ]  # fmt: skip


def engine_options(index: int, shift: Shift, place: str, first: Path) -> list[str]:
    """Options of a vLLM that begins with the draft in `first`, follows the store and records."""
    speculative = {
        "method": "eagle3",
        "model": str(first),
        "num_speculative_tokens": shift.k,
        "draft_sample_method": "probabilistic",
    }
    settings = {
        "buffer": f"{place}/buffer",
        "versions": f"{place}/store",
        "engine": f"engine-{index + 1}",
        "cache": str(shift.folder / f"cache-{index + 1}"),
        "poll_s": 1.0,
        "mend_expand_kernel": True,
    }
    return [
        *("--speculative-config", json.dumps(speculative)),
        *("--additional-config", json.dumps({"draftsmith": settings})),
    ]


@contextmanager
def engine(index: int, shift: Shift, python: str, place: str, first: Path) -> Iterator[str]:
    """A running vLLM of the fleet; its URL."""
    options = engine_options(index, shift, place, first)
    where = variables(shift.folder / "installed")
    with vllm_server(python, shift.target, options, variables=where) as (url, group), awake(group):
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
        print(f"{one['engine']}: version {one['version']}")


def sentence(one: dict[str, float]) -> str:
    return f"alpha {one['alpha']:.3f}, tau {one['tau']:.3f} over {one['rounds']:.0f} rounds"


def verdict(figures: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on what did not hold; none where all did."""
    requests = figures["requests"]
    if figures["failed"] or not requests:
        yield f"{figures['failed']} of {requests} requests failed"
    if figures["equal_texts"] != requests:
        yield f"{figures['equal_texts']} of {requests} texts are in the records as clients got them"
    far = {name: z for name, z in figures["z"].items() if not abs(z) < MOST_Z}
    if far or not figures["z"]:
        yield f"losslessness has z {far or 'of no event'}"
    if figures["violations"]:
        yield f"{figures['violations']} tokens were emitted that the target cannot sample"
    served = {one["version"] for one in figures["engines"]}
    if served != {figures["live"]}:
        yield f"engines serve versions {sorted(map(str, served))}, not the live {figures['live']}"


if __name__ == "__main__":
    main()
