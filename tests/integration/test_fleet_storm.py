"""A small storm of kills over a fleet of stand-in engines, with the real recorder, writer, follower,
store and publisher: nothing finished is lost beyond what was not flushed, no spoilt version is
served, and all engines end on the learner's version by themselves."""

from __future__ import annotations

import random
import time
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafters import versions
from draftsmith.fleet.store.layout import StoreError
from draftsmith.fleet.store.store import VersionStore
from scripts.bench.fleet.answers import recorded
from tests.integration.fleet_stand_ins import NAMES, Nursery, answer_to, ask, listens
from tests.storm import survived
from tests.storm.kills import PLANTED, Answer, Fleet, Kill, Storm, converged
from tests.storm.places import FolderPlace
from tests.storm.supervisor import Part, wait_for_end

ENGINES = ("engine-1", "engine-2")
TOKENS = 24
QUESTIONS = [[1 + random.Random(n).randrange(40) for _ in range(5)] for n in range(12)]
KILLS = [
    Kill("publisher"), Kill("server", "engine-1"), Kill("store"), Kill("server", "engine-2"),
    Kill("writer", "engine-1"), Kill("learner"),
]  # fmt: skip
# Ten times the writers' flush: other tests may have all cores.
UNFLUSHED_S = 1.0
PATIENCE_S = 120.0


class Asked:
    """Clients' side; `served` are the digests of what answered, by version."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.served: set[tuple[str, str]] = set()

    def __call__(self, engine: str, question: int) -> Answer | None:
        begun_s, name = time.time(), f"cmpl-{uuid.uuid4().hex}"
        body = {"id": name, "prompt": QUESTIONS[question], "max_tokens": TOKENS}
        found = ask(str(self.folder / engine), body)
        if found is None:
            return None
        self.served.add((found["version"], found["sha256"]))
        return Answer(
            name, QUESTIONS[question], found["tokens"], engine, question, begun_s, time.time()
        )


def fleet_of(folder: Path, nursery: Nursery, place: FolderPlace) -> Fleet:
    learned = folder / "learned"
    learned.mkdir()
    store, buffer = place.url("store"), place.url("buffer")
    starts: dict[str, tuple[Any, ...]] = {
        "learner": ("learner", learned, 0.4),
        "publisher": ("publisher", learned, store),
        **{
            name: ("engine", name, folder / name, store, buffer, folder / f"cache-{name}")
            for name in ENGINES
        },
    }
    parts = {
        name: Part(
            name,
            partial(nursery.start, *words),
            (lambda name=name: name not in ENGINES or listens(str(folder / name))),
        )
        for name, words in starts.items()
    }
    processes = {"writer": NAMES["writer"]}
    return Fleet(
        place, VersionStore(store), learned, parts, ENGINES, processes, Asked(folder)
    )  # fmt: skip


@pytest.mark.long
def test_a_storm_of_kills_loses_nothing_finished_and_all_come_to_one_version(
    tmp_path: Path,
) -> None:
    nursery = Nursery(tmp_path / "log.txt")
    fleet = fleet_of(tmp_path, nursery, FolderPlace(tmp_path))
    try:
        until(lambda: all(fleet.parts[name].up for name in ENGINES))
        storm = Storm(
            fleet, questions=len(QUESTIONS), clients=3, seed=1, pause_s=0.4, away_s=0.6,
            patience_s=PATIENCE_S,
        )  # fmt: skip
        until(lambda: all(storm.log.reported.get(name) for name in ENGINES))
        until(lambda: len(storm.log.answers) > 30)
        storm.strike(KILLS, plant_after=4)
        until(lambda: storm.answered() == set(ENGINES))
        until(storm.planted_is_refused)
        until(lambda: fleet.store.current_or_none() != PLANTED)
        storm.end_traffic()
        fleet.parts["learner"].stop()
        seconds = converged(fleet, PATIENCE_S)
        storm.end()
        verified = versions.versions(fleet.learned)
        digests = digests_of(fleet.store, verified)
    finally:
        for part in fleet.parts.values():
            part.stop()
        nursery.close()
    assert wait_for_end(NAMES["writer"], PATIENCE_S), "writers flush and end with their engines"
    log = (tmp_path / "log.txt").read_text()
    records = recorded(fleet.place.url("buffer"), len(storm.log.answers), patience_s=0.0)
    unflushed_s = UNFLUSHED_S + 2 * max(0.0, survived.behind(storm.log, records))
    found = survived.texts(storm.log, records, unflushed_s)
    failed = survived.failures(storm.log)
    print(found, failed, seconds, unflushed_s, log[-3000:])
    assert seconds is not None
    assert [one.kill for one in storm.log.struck] == KILLS
    assert all(one.has_hit and one.back_s is not None for one in storm.log.struck)
    # Two servers were killed under three clients.
    assert failed["failed"] > 0 and failed["failed_elsewhere"] == []
    assert found["changed"] == found["lost_elsewhere"] == []
    assert found["recorded"] > 50 and found["oldest_lost_s"] <= unflushed_s
    expected = {number: answer_to(prompt, TOKENS) for number, prompt in enumerate(QUESTIONS)}
    assert all(one.tokens == expected[one.question] for one in storm.log.answers)
    seen = survived.versions_of(storm.log, records, verified)
    assert seen["unverified"] == [] and len(seen["reported"]) > 1
    nothing = [one for one in fleet.ask.served if not one[0]]  # type: ignore[attr-defined]
    served = fleet.ask.served - set(nothing)  # type: ignore[attr-defined]
    assert served and served <= digests
    assert {part.name for part in fleet.parts.values() if part.starts > 1} >= {
        "learner", "publisher", *ENGINES,
    }  # fmt: skip


def digests_of(store: VersionStore, verified: list[int]) -> set[tuple[str, str]]:
    """Digests by version, of those that are whole in the store: a publisher was killed, and what it
    had half uploaded may not be live any more."""
    found = set()
    for version in set(verified) & set(store.versions()):
        with suppress(StoreError):
            mark = store.manifest(version)["files"]["vllm/model.safetensors"]
            found.add((str(version), mark["sha256"]))
    return found


def until(holds: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            if holds():
                return
        except Exception as error:  # the store is away
            print(error)
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
