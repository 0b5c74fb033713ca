"""A storm of kills over the loop: API servers, engines, writers of records, learner, publisher and
store, under traffic. Each is started again as a supervisor does, and by no hand. A spoilt version
is planted in the midst of it. Every kill must hit and what it hit must come back; what clients got
whole is compared with the records, greedy texts with those of a plain engine; requests may fail
while their engine is down alone, and all engines must end on one version."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from draftsmith.drafters.published import versions
from draftsmith.errors import UserError
from draftsmith.fleet.store.store import VersionStore
from scripts.bench.fleet import loop, survived, verdict
from scripts.bench.fleet.answers import recorded
from scripts.bench.fleet.door import free_port
from scripts.bench.fleet.installed import variables
from scripts.bench.fleet.kills import PLANTED, Answer, Fleet, Storm, converged, learned, planned
from scripts.bench.fleet.places import Place, place_of
from scripts.bench.fleet.supervisor import Part, program, wait_for_end
from scripts.bench.serving.peers import VLLM_VARIABLES, vllm_command, vllm_server
from scripts.bench.serving.systems import awake
from scripts.demo.traffic import Shift, traffic

# A writer flushes once a second. How far it was behind comes on top.
UNFLUSHED_S = 3.0
WRITER = "draftsmith.fleet.wire.writer"
PROCESSES = {"core": "VLLM::", "writer": WRITER}
# Learned by nothing in the storm: without graphs an engine is up sooner.
PLAIN = ("--enforce-eager",)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", default="eagle3", choices=tuple(loop.METHODS))
    parser.add_argument("--k", type=int, default=3, help="draft tokens per round")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument(
        "--store", default="folder", choices=("folder", "s3"), help="of versions and records"
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=8.0, help="longest, between two kills")
    parser.add_argument("--away-s", type=float, default=15.0, help="longest, of the store")
    parser.add_argument("--converge-s", type=float, default=300.0, help="bound of the end")
    parser.add_argument("--greedy", type=int, default=24, help="prompts asked greedily too")
    parser.add_argument("--prose", type=int, default=400, help="prompts asked at T = 1")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="10 kills, 24 tokens")


def run(chosen: argparse.Namespace, python: str) -> dict[str, Any]:
    if chosen.quick:
        chosen.kills, chosen.max_tokens, chosen.greedy = 10, 24, 8
    with tempfile.TemporaryDirectory() as name, place_of(chosen.store, Path(name)) as place:
        folder = Path(name)
        shift = Shift(
            chosen.run / "target", loop.draft_of(chosen), folder, chosen.k, code=0,
            prose=chosen.prose, max_tokens=chosen.max_tokens, clients=chosen.clients,
        )  # fmt: skip
        prompts = traffic(shift)
        expected = plain_texts(chosen, python, prompts[: chosen.greedy])
        begun_s = time.monotonic()
        parts: dict[str, Part] = {}
        urls = {
            f"engine-{index + 1}": f"http://127.0.0.1:{free_port()}"
            for index in range(chosen.engines)
        }
        try:
            fleet = fleet_of(chosen, python, shift, place, prompts, parts, urls)
            figures = outlived(fleet, chosen, expected, urls)
        finally:
            for part in parts.values():
                part.stop()
            loop.keep_logs(folder, chosen)
        figures["seconds"] = time.monotonic() - begun_s
        figures["broken"] = list(verdict.of_storm(figures))
    report(figures)
    return figures


def plain_texts(
    chosen: argparse.Namespace, python: str, prompts: Sequence[list[int]]
) -> dict[int, list[int]]:
    """Greedy tokens by number of question, of an engine with neither plugin nor draft."""
    with (
        vllm_server(python, chosen.run / "target", PLAIN) as (url, group),
        awake(group),
        ThreadPoolExecutor(chosen.clients) as pool,
    ):
        send = partial(completion, url, chosen, temperature=0.0)
        answers = list(pool.map(send, prompts))
    found = {}
    for number, values in enumerate(answers):
        if values is None:
            sys.exit("bench_fleet: the plain engine gave no whole answer")
        found[2 * number] = values["choices"][0]["token_ids"]
    return found


def completion(
    url: str, chosen: argparse.Namespace, prompt: list[int], temperature: float
) -> dict[str, Any] | None:
    """Answer of an engine; None where it was not whole."""
    body = {
        "model": str(chosen.run / "target"), "prompt": prompt, "max_tokens": chosen.max_tokens,
        "temperature": temperature, "return_token_ids": True,
    }  # fmt: skip
    with suppress(httpx.HTTPError, json.JSONDecodeError, KeyError):
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
        values: dict[str, Any] = answer.raise_for_status().json()
        if values["choices"][0]["finish_reason"] in ("length", "stop"):
            return values
    return None


def fleet_of(
    chosen: argparse.Namespace,
    python: str,
    shift: Shift,
    place: Place,
    prompts: Sequence[list[int]],
    parts: dict[str, Part],
    urls: Mapping[str, str],
) -> Fleet:
    """Learner, publisher and engines, all up; `parts` has them as soon as they are started."""
    folder = shift.folder
    store = VersionStore(place.url("store"), cache=folder / "first")
    # All versions stay, for the engines' to be found among them.
    words = [*loop.learner(shift, place), "retention.versions=0"]
    learning = program(words, folder / "distill.log")
    parts["learner"] = Part("learner", learning)
    loop.until(lambda: versions.latest(folder / "versions"), "the learner's first version")
    publishing = program(loop.publisher(shift, place), folder / "publish.log")
    parts["publisher"] = Part("publisher", publishing)
    first = store.fetch(loop.until(store.current, "the first version in the store"), "vllm")
    where = VLLM_VARIABLES | variables(folder / "installed", place.path)
    for index, (name, url) in enumerate(urls.items()):
        options = [*loop.engine_options(index, chosen, folder, place, first), *PLAIN]
        options += ["--port", url.rpartition(":")[2]]
        command = vllm_command(python, chosen.run / "target", options)
        starts = program(command, folder / f"{name}.log", where)
        parts[name] = Part(name, starts, partial(is_healthy, url))
    loop.until(lambda: all(parts[name].up for name in urls), "every engine")

    def ask(engine: str, question: int) -> Answer | None:
        """Questions in turn: greedy ones, which come again and again, and sampled ones."""
        number, is_sampled = divmod(question, 2)
        prompt = prompts[number % (len(prompts) if is_sampled else chosen.greedy)]
        begun_s = time.time()
        values = completion(urls[engine], chosen, prompt, float(is_sampled))
        if values is None:
            return None
        tokens = values["choices"][0]["token_ids"]
        asked = question if is_sampled else 2 * (number % chosen.greedy)
        return Answer(values["id"], prompt, tokens, engine, asked, begun_s, time.time())

    return Fleet(place, store, folder / "versions", parts, list(urls), PROCESSES, ask)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TimeoutException:
        return True  # busy; an engine that has died refuses
    except httpx.HTTPError:
        return False


def outlived(
    fleet: Fleet,
    chosen: argparse.Namespace,
    expected: Mapping[int, Sequence[int]],
    urls: Mapping[str, str],
) -> dict[str, Any]:
    """Figures of a storm over a running fleet, and of what is there after it."""
    begun_s = time.time()
    storm = Storm(
        fleet, questions=2 * chosen.prose, clients=chosen.clients, seed=chosen.seed,
        pause_s=chosen.pause_s, away_s=chosen.away_s, patience_s=loop.PATIENCE_S,
    )  # fmt: skip
    kills = planned(fleet.engines, chosen.kills, chosen.seed)
    storm.strike(kills, plant_after=chosen.kills // 2)
    loop.until(lambda: storm.answered() >= set(fleet.engines), "an answer of every engine")
    loop.until(storm.planted_is_refused, "a refusal of the planted version")
    is_replaced = learner_replaces(fleet, chosen.converge_s)
    storm.end_traffic()
    fleet.parts["learner"].stop()
    seconds = converged(fleet, chosen.converge_s)
    storm.end()
    digests = {name: digest_of(url) for name, url in urls.items()}
    for name in fleet.engines:
        fleet.parts[name].stop()
    # The command line of a writer names its buffer.
    writers_ended = wait_for_end(fleet.place.url("buffer"), loop.PATIENCE_S)
    records = recorded(fleet.place.url("buffer"), len(storm.log.answers), patience_s=5.0)
    unflushed_s = UNFLUSHED_S + max(0.0, survived.behind(storm.log, records))
    return {
        "planned": chosen.kills,
        "kills": [one.figures(begun_s) for one in storm.log.struck],
        "starts": {name: part.starts for name, part in fleet.parts.items()},
        "writers_ended": writers_ended,
        "unflushed_s": unflushed_s,
        **survived.failures(storm.log),
        **survived.texts(storm.log, records, unflushed_s),
        **survived.greedy(storm.log, expected),
        **survived.versions_of(storm.log, records, verified(fleet.learned)),
        "served_after": survived.served_after(storm.log, fleet.engines),
        "swaps": storm.statuses.swaps(),
        **loop.losslessness(fleet.place.url("buffer")),
        "learned": learned(fleet),
        "replaced_by_learner": is_replaced,
        "converged_s": seconds,
        "digests": digests,
    }


def digest_of(url: str) -> str:
    """Digest of the draft that an engine has loaded."""
    status = httpx.get(f"{url}/draftsmith/status", timeout=60).raise_for_status().json()
    digests = {str(one.get("digest") or "") for one in status["workers"]}
    return digests.pop() if len(digests) == 1 else ""


def learner_replaces(fleet: Fleet, limit_s: float) -> bool:
    """True once a version of the learner is live in place of the spoilt one. After the limit the
    learner's latest is promoted, as an operator does, and False returned."""
    deadline_s = time.monotonic() + limit_s
    while current_of(fleet) in (None, PLANTED):
        latest = learned(fleet)
        if time.monotonic() > deadline_s and latest is not None:
            fleet.store.put_current(latest)
            return False
        time.sleep(0.5)
    return True


def current_of(fleet: Fleet) -> int | None:
    """Live version of the store, None where it is away."""
    with suppress(Exception):
        return fleet.store.current()
    return None


def verified(root: Path) -> list[int]:
    """Versions of the learner all of whose files are what it published."""
    found = []
    for version in versions.versions(root):
        with suppress(UserError):
            versions.open_version(root, version)
            found.append(version)
    return found


def report(figures: dict[str, Any]) -> None:
    kills = figures["kills"]
    times = [one["back_after_s"] for one in kills if one["back_after_s"] is not None]
    counts = Counter(one["what"] for one in kills)
    z = ", ".join(f"{name} {value:.2f}" for name, value in figures["z"].items())
    print(
        f"\n{len(kills)} kills in {figures['seconds']:.0f} s ({dict(counts)}), "
        f"{sum(one['has_hit'] for one in kills)} of which hit; back after "
        f"{max(times, default=0.0):.1f} s at most; starts {figures['starts']}\n"
        f"{figures['answers']} answers whole at their clients, {figures['recorded']} recorded with "
        f"the same tokens, {len(figures['changed'])} with others; {figures['failed']} requests "
        f"failed, {len(figures['failed_elsewhere'])} of them with their engine up\n"
        f"lost with a killed writer: {figures['lost_where_admitted']}, of which "
        f"{figures['finished_before_the_kill']} had ended up to {figures['oldest_lost_s']:.1f} s "
        f"before (admitted: {figures['unflushed_s']:.0f} s); lost elsewhere: "
        f"{len(figures['lost_elsewhere'])}\n"
        f"greedy: {figures['greedy_equal']} of {figures['greedy']} are the plain engine's\n"
        f"losslessness: z {z}; {figures['violations']} violations\n"
        f"versions reported: {figures['reported']}, of which not verified: "
        f"{figures['unverified']}; refused: {figures['refused']}"
    )
    by = "the learner's next" if figures["replaced_by_learner"] else "hand"
    print(f"the spoilt version was replaced by {by}")
    loop.report_swaps(figures["swaps"])
    seconds = figures["converged_s"]
    print("did not converge" if seconds is None else f"on one version after {seconds:.1f} s")
