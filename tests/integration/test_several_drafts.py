"""A version on trial beside the live draft, in one engine."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import SuffixOptions
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.drafters.versions import Canary, remove_canary, write_canary
from draftsmith.errors import UserError
from draftsmith.record import RoundRecord, hashed
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.requests.request import CANARY, LIVE, Request, Update
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.watch import VersionWatcher
from tests.integration.served import finish, publish
from tests.stand_in_drafts import unlike
from tests.waiting import wait_until

PROMPT = [5, 60, 7, 200, 9, 33]
PROMPTS = [PROMPT, [9, 8, 7], [100, 4, 100, 4, 100, 4, 77], [61, 62, 63, 64]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
CONFIG = EngineConfig(k=3, compile="off", prefix_cache=False)


@pytest.fixture(scope="module")
def folders(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two EAGLE-3 drafts, of seeds 1 and 2."""
    root = tmp_path_factory.mktemp("drafts")
    for seed in (1, 2):
        checkpoint.save(unlike(target, seed), root / str(seed), target)
    return [str(root / str(seed)) for seed in (1, 2)]


def take_in(engine: EngineCore, folder: str, version: str, draft: str) -> None:
    engine.drafts.prepare(folder, version, draft=draft)
    engine.step()


KINDS = {
    "chains": ("eagle3", {}, {}),
    "sampled trees": ("eagle3", {}, {"k": 9, "tree": "sampled:3x2"}),
    "blocks": ("dspark", {}, {}),
    "text first": ("draft-lm", {"num_layers": 1, "hidden_size": 32}, {}),
}


@pytest.mark.parametrize(
    "kind",
    [
        "chains",
        "sampled trees",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("blocks", "text first")),
    ],
)
def test_a_row_is_drafted_as_if_its_draft_were_alone(
    kind: str, target: Target, tmp_path: Path
) -> None:
    """Token for token, sampled and greedy: every draw is the request's own, so that nothing but the
    wrong draft could differ."""
    family, options, settings = KINDS[kind]
    config = EngineConfig(**{"k": 3, "compile": "off", "prefix_cache": False, **settings})
    folders = [tmp_path / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        checkpoint.save(unlike(target, seed, family, **options), folder, target)

    def engine_of(folder: Path) -> EngineCore:
        drafter = checkpoint.load(folder, target)
        if kind == "text first":
            # What others said would be there to copy together and not alone.
            text = Suffix(SuffixOptions(max_spec_offset=1.0, max_cached_requests=0))
            drafter = TextFirst(drafter, text, share=0.3)
        return build_engine(target, drafter, config)

    def ask(engine: EngineCore, seed: int) -> Request:
        temperature = 0.0 if seed % 3 == 0 else 1.5
        params = SamplingParams(
            temperature=temperature,
            max_tokens=16,
            ignore_eos=True,
            seed=seed,
            repetition_penalty=1.1,
        )
        return engine.submit(PROMPTS[seed % 4], params)

    together = engine_of(folders[0])
    take_in(together, str(folders[1]), "1", CANARY)
    requests = []
    for share in (0.0, 1.0):
        together.drafts.canary_share = share
        requests.append([ask(together, seed) for seed in range(4)])
    finish(together)
    told = []
    for name, folder, mine in zip((LIVE, CANARY), folders, requests, strict=True):
        alone = engine_of(folder)
        again = [ask(alone, seed) for seed in range(4)]
        finish(alone)
        assert {request.draft_name for request in mine} == {name}
        assert [one.output for one in mine] == [one.output for one in again]
        told.append([one.speculation for one in mine])
        assert told[-1] == [one.speculation for one in again]
    assert told[0] != told[1], "these drafts could not be told apart"
    assert not together.stats.fallbacks


def test_records_and_counts_name_the_version_that_drafted(
    target: Target, folders: list[str], records: list[RoundRecord]
) -> None:
    engine = build_engine(target, unlike(target, 0), CONFIG, sink=records, draft_version="6")
    take_in(engine, folders[0], "7", CANARY)
    engine.drafts.canary_share = 1.0
    trial = engine.submit(PROMPT, GREEDY)
    for _ in range(4):
        engine.step()
    engine.drafts.canary_share = 0.0
    engine.drafts.prepare(folders[1], "8", draft=CANARY)
    later = engine.submit(PROMPT, GREEDY)
    finish(engine)
    assert [one.draft_name for one in (trial, later)] == [CANARY, LIVE]
    assert trial.output == later.output
    drafted = [record for record in records if record.drafted]
    told = [
        [one.draft_version for one in drafted if one.request == hashed(request.id)]
        for request in (trial, later)
    ]
    assert [sorted(set(each)) for each in told] == [["7", "8"], ["6"]]
    assert told[0] == sorted(told[0])
    rounds = {
        version: sum(counts.committed.values())
        for version, counts in engine.stats.by_version.items()
    }
    assert rounds == Counter(one.draft_version for one in drafted)
    assert engine.stats.routed == {CANARY: 1, LIVE: 1} and engine.stats.num_swaps == 2
    assert engine.stats.draft_versions == {LIVE: "6", CANARY: "8"}


def test_no_draft_reads_what_another_left_in_the_prefix_cache(
    target: Target, folders: list[str]
) -> None:
    engine = build_engine(
        target, unlike(target, 0), replace(CONFIG, prefix_cache=True, block_size=4)
    )
    take_in(engine, folders[0], "1", CANARY)
    short = replace(GREEDY, max_tokens=4)
    hits = []
    for engine.drafts.canary_share in (0.0, 1.0, 0.0, 1.0):
        engine.submit(PROMPT * 3, short)
        finish(engine)
        hits.append(engine.stats.prefix_cache_hits)
    assert hits[0] == hits[1] == 0 < hits[2] < hits[3]


@contextmanager
def failing(drafter: Eagle3, how: str) -> Iterator[None]:
    """A draft that raises, or has weights that are NaN."""
    if how == "nan":
        kept = drafter.fc.weight.clone()
        drafter.fc.weight.data.fill_(torch.nan)
        yield
        drafter.fc.weight.data.copy_(kept)
        return

    def broken(inputs: DraftInputs) -> Proposal:
        raise RuntimeError("it fails")

    drafter.propose = broken
    yield
    del drafter.propose


@pytest.mark.parametrize("how", ["raised", "nan"])
def test_a_bad_version_on_trial_pauses_alone(how: str, target: Target, folders: list[str]) -> None:
    def begin() -> tuple[EngineCore, list[Request]]:
        engine = build_engine(target, unlike(target, 0), CONFIG)
        take_in(engine, folders[0], "7", CANARY)
        requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:2]]
        engine.step()
        engine.drafts.canary_share = 1.0
        requests += [engine.submit(prompt, GREEDY) for prompt in PROMPTS[2:]]
        engine.step()
        return engine, requests

    engine, requests = begin()
    tried = engine.drafts.served[CANARY].drafter
    assert isinstance(tried, Eagle3)
    with failing(tried, how):
        for _ in range(2):
            engine.step()
        assert engine.drafts.ready == [LIVE]
        late = engine.submit(PROMPT, GREEDY)
        engine.step()
        assert late.draft_name == LIVE, "nobody new for a draft that rests"
    finish(engine)
    other, sound = begin()
    finish(other)
    assert engine.stats.fallbacks[how] >= 2 and set(engine.stats.fallbacks) == {how}
    assert [one.output for one in requests] == [one.output for one in sound]
    # The live draft's rows were drafted in every round, as if nothing had happened.
    assert [one.speculation for one in requests[:2]] == [one.speculation for one in sound[:2]]
    for request in requests[2:]:
        assert request.draft_name == CANARY
        assert 0 < len(request.speculation.offered) < request.speculation.num_passes - 2, (
            "it rested, and came back"
        )


def test_a_retired_draft_goes_when_its_last_request_has_ended(
    target: Target, folders: list[str]
) -> None:
    engine = build_engine(target, unlike(target, 0), CONFIG)
    take_in(engine, folders[0], "1", CANARY)
    engine.drafts.canary_share = 1.0
    long = engine.submit(PROMPT, GREEDY)
    for _ in range(3):
        engine.step()
    engine.drafts.retire(CANARY)
    late = engine.submit(PROMPT, GREEDY)
    engine.step()
    assert (
        CANARY in engine.drafts.served
        and CANARY not in engine.drafts.ready
        and late.draft_name == LIVE
    )
    while not long.finished:
        engine.step()
    assert list(engine.drafts.served) == [LIVE] == list(engine.stats.draft_versions)
    # To its end: its first token comes without drafts, and the last round may have no room for any.
    assert len(long.speculation.offered) >= long.speculation.num_passes - 2
    finish(engine)
    take_in(engine, folders[1], "2", CANARY)
    assert engine.drafts.ready == [LIVE, CANARY]
    engine.drafts.retire(CANARY)
    assert engine.drafts.ready == [LIVE] == list(engine.drafts.served), "nobody had it"


@pytest.mark.parametrize("case", ["shape", "layers", "text", "room"])
def test_a_draft_that_does_not_fit_does_not_come_beside_the_live_one(
    case: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: object = unlike(target, 0)
    if case == "text":
        live, other = Suffix(SuffixOptions()), unlike(target, 1)
    elif case == "room":
        other = unlike(target, 1)
    else:
        other = unlike(
            target, 1, **({"draft_vocab_size": 100} if case == "shape" else {"taps": (1,)})
        )
    checkpoint.save(other, tmp_path, target)
    engine = build_engine(target, live, replace(CONFIG, compile="auto"))

    def full(drafter: Eagle3) -> None:
        raise torch.OutOfMemoryError("nothing is left")

    if case == "room":
        monkeypatch.setattr(Eagle3, "capture_forward", full)
    with pytest.raises(UserError):
        engine.drafts.prepare(str(tmp_path), "7", draft=CANARY)
    assert list(engine.drafts.served) == [LIVE] and engine.stats.num_swaps_refused == 1


def test_the_watcher_follows_trials(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in (1, 2, 3):
        publish(tmp_path, unlike(target, seed), target)
    strange = publish(tmp_path, unlike(target, 4), target, target={"revision": "another"})
    versions.rollback(tmp_path, 1, "a test")
    engine = build_engine(target, unlike(target, 0), CONFIG, draft_version="0")
    loop = EngineLoop(engine).start()
    watcher, drafts = VersionWatcher(loop, tmp_path), engine.drafts

    def served(expected: dict[str, str]) -> None:
        watcher.look()
        wait_until(lambda: engine.stats.draft_versions == expected)

    try:
        write_canary(tmp_path, Canary(2, 0.25))
        served({LIVE: "1", CANARY: "2"})
        assert drafts.canary_share == 0.25
        write_canary(tmp_path, Canary(3, 0.5))
        served({LIVE: "1", CANARY: "3"})
        assert drafts.canary_share == 0.5
        # One that is refused is not to be taken for the one before.
        write_canary(tmp_path, Canary(strange, 0.5))
        served({LIVE: "1"})
        assert drafts.canary_share == 0.0 and "stays out" in caplog.text
        # One that cannot be read is the end of the trial, as it is for the learner, and is told
        # once.
        write_canary(tmp_path, Canary(3, 0.5))
        served({LIVE: "1", CANARY: "3"})
        (tmp_path / "canary.json").write_text("{", encoding="utf-8")
        for _ in range(2):
            served({LIVE: "1"})
        assert drafts.canary_share == 0.0
        assert len([one for one in caplog.records if "canary.json" in one.message]) == 1
        write_canary(tmp_path, Canary(2, 0.25))
        served({LIVE: "1", CANARY: "2"})
        remove_canary(tmp_path)
        served({LIVE: "1"})
    finally:
        loop.close()


def test_a_further_draft_is_captured_beside_running_rounds(
    target: Target, folders: list[str]
) -> None:
    """As the first one was, on the caller's thread: the rounds meanwhile are those of any other
    time."""
    config = EngineConfig(k=3)
    expected = [one.tokens for one in build_engine(target, None, config).generate(PROMPTS, GREEDY)]
    engine = build_engine(target, unlike(target, 0), config)
    loop = EngineLoop(engine).start()
    stop, outputs = threading.Event(), []

    def traffic() -> None:
        while not stop.is_set():
            ended = threading.Semaphore(0)

            def tell(request: Request, update: Update, ended: threading.Semaphore = ended) -> None:
                if update.finish_reason is not None:
                    ended.release()

            requests = [loop.submit(prompt, GREEDY, tell) for prompt in PROMPTS]
            for _ in requests:
                ended.acquire()
            outputs.append([request.output for request in requests])

    client = threading.Thread(target=traffic)
    client.start()
    try:
        loop.swap(folders[0], "1", draft=CANARY)
    finally:
        stop.set()
        client.join()
        loop.close()
    assert outputs and all(output == expected for output in outputs) and not engine.stats.fallbacks
    further = engine.drafts.served[CANARY].drafter
    assert isinstance(further, Eagle3) and further._captured is not None
