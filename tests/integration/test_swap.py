"""New draft weights under a running engine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.heads.mtp import Mtp
from draftsmith.drafters.options import Eagle3Options, MtpOptions
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.errors import UserError
from draftsmith.serve import watch
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine import live_draft
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.live_draft import Swap
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.requests.request import FinishReason
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.watch import VersionWatcher
from tests.integration.served import Swaps, finish, publish, small
from tests.stand_in_drafts import unlike
from tests.waiting import wait_until

PROMPTS = [[5, 60, 7, 200, 9, 33], [9, 8, 7], [100, 4, 100, 4, 100, 4, 77]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def new_eagle3(target: Target, seed: int, **options: Any) -> Eagle3:
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    return Eagle3.create(Eagle3Options(**options), target, seed=seed, token_counts=counts).eval()


def full(folder: Path, target: Target) -> NoReturn:
    raise torch.OutOfMemoryError("nothing is left")


def saved(target: Target, drafter: object, folder: Path) -> str:
    checkpoint.save(drafter, folder, target)
    return str(folder)


@pytest.fixture(scope="module")
def folders(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("drafts")
    return [saved(target, new_eagle3(target, seed), root / str(seed)) for seed in (1, 2)]


def test_after_a_swap_the_engine_drafts_with_the_new_weights(
    target: Target, folders: list[str]
) -> None:
    drafter = new_eagle3(target, 0)
    engine = build_engine(target, drafter, EngineConfig(k=3), draft_version="0")
    swap = engine.draft.prepare(folders[0], "1")
    assert not swap.applied.done() and engine.stats.draft_version == "0"
    engine.step()
    assert swap.applied.done() and engine.stats.draft_version == "1"
    assert engine.stats.swap_pauses_s == [swap.pause_s]
    published = checkpoint.load(folders[0], target).state_dict()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, published[name])


# A chain of states, heads apart, blocks, a model.
@pytest.mark.parametrize(
    "family",
    [
        "eagle3",
        "medusa",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("dspark", "draft-lm")),
    ],
)
def test_greedy_text_is_the_same_with_a_swap_before_every_round(
    family: str, target: Target, tmp_path: Path
) -> None:
    config = EngineConfig(k=3, compile="off")
    expected = build_engine(target, None, config).generate(PROMPTS, GREEDY)
    drafter = unlike(target, 0, family, **small(family))
    addresses = {name: tensor.data_ptr() for name, tensor in drafter.state_dict().items()}
    engine = build_engine(target, drafter, config)
    swaps = Swaps(engine, family, tmp_path)
    requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    finish(engine, swaps)
    assert [request.output for request in requests] == [one.tokens for one in expected]
    assert {name: tensor.data_ptr() for name, tensor in drafter.state_dict().items()} == addresses
    assert engine.stats.num_swaps == swaps.rounds > 5 and not engine.stats.fallbacks
    assert engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("case", ["family", "shape", "layers", "nan", "missing", "corrupt", "room"])
def test_a_draft_that_does_not_fit_is_refused_and_the_old_one_stays(
    case: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "draft"
    if case == "family":
        saved(target, Mtp.create(MtpOptions(), target, seed=0), folder)
    elif case == "shape":
        saved(target, new_eagle3(target, 1, draft_vocab_size=100), folder)
    elif case == "layers":
        saved(target, new_eagle3(target, 1, taps=(1,)), folder)
    elif case != "missing":
        saved(target, new_eagle3(target, 1), folder)
        weights = folder / "model.safetensors"
        if case == "nan":
            tensors = load_file(weights)
            tensors["fc.weight"][0, 0] = torch.nan
            save_file(tensors, weights)
        elif case == "room":
            monkeypatch.setattr(live_draft, "load", full)
        else:
            weights.write_bytes(weights.read_bytes()[:-100])
    drafter = new_eagle3(target, 0)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    engine = build_engine(target, drafter, EngineConfig(), draft_version="0")
    with pytest.raises(UserError) as error:
        engine.draft.prepare(str(folder), "1")
    assert "\n" not in str(error.value)
    engine.step()
    assert engine.stats.num_swaps_refused == 1 and engine.stats.num_swaps == 0
    assert engine.stats.draft_version == "0"
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())


def test_only_a_trained_draft_can_be_swapped(target: Target, folders: list[str]) -> None:
    for drafter in (None, Suffix()):
        with pytest.raises(UserError, match="without a trained draft"):
            build_engine(target, drafter, EngineConfig()).draft.prepare(folders[0], "1")


def test_the_watcher_follows_new_versions_and_rollbacks_under_load(
    target: Target, tmp_path: Path
) -> None:
    plain = build_engine(target, None, EngineConfig()).generate(PROMPTS, GREEDY)
    engine = build_engine(target, new_eagle3(target, 0), EngineConfig(k=3))
    loop = EngineLoop(engine).start()
    watcher = VersionWatcher(loop, tmp_path, poll_s=0.01).start()
    # Making a draft runs the target, which is the engine's alone once requests are running.
    first, second = new_eagle3(target, 1), new_eagle3(target, 2)
    finished: list[threading.Event] = []
    requests = []
    try:
        for wanted, act in (
            ("1", lambda: publish(tmp_path, first, target)),
            ("2", lambda: publish(tmp_path, second, target, parent=1)),
            ("1", lambda: versions.rollback(tmp_path, 1, "a test")),
        ):
            for prompt in PROMPTS:
                done = threading.Event()
                finished.append(done)
                ended = lambda _, update, done=done: update.finish_reason and done.set()  # noqa: E731
                requests.append(loop.submit(prompt, GREEDY, ended))
            act()
            wait_until(lambda wanted=wanted: engine.stats.draft_version == wanted)
        assert all(done.wait(30) for done in finished)
    finally:
        watcher.stop()
        loop.close()
    assert [request.output for request in requests] == [one.tokens for one in plain] * 3
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
    assert engine.stats.num_swaps == 3 and max(engine.stats.swap_pauses_s) < 1.0


def test_the_watcher_leaves_a_corrupt_version_alone_until_its_files_change_and_takes_the_next(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def noted(root: Path, version: int) -> Path:
        opened.append(version)
        return versions.open_version(root, version)

    monkeypatch.setattr(watch, "open_version", noted)
    engine = build_engine(target, new_eagle3(target, 0), EngineConfig())
    loop = EngineLoop(engine).start()
    watcher = VersionWatcher(loop, tmp_path)
    try:
        assert not watcher.look()
        publish(tmp_path, new_eagle3(target, 1), target)
        weights = versions.folder_of(tmp_path, 1) / "model.safetensors"
        good = weights.read_bytes()
        weights.write_bytes(good + b"x")
        for _ in range(3):
            assert not watcher.look()
        assert opened == [1], "gigabytes are not read anew every second"
        weights.write_bytes(good)
        assert watcher.look() and engine.stats.draft_version == "1" and opened == [1, 1]
        publish(tmp_path, new_eagle3(target, 2), target)
        assert watcher.look() and engine.stats.draft_version == "2"
        (tmp_path / "current").write_text("one", encoding="utf-8")
        assert not watcher.look()
    finally:
        loop.close()
    assert engine.stats.num_swaps == 2


def test_a_failure_nobody_foresaw_does_not_end_the_watching(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = build_engine(target, new_eagle3(target, 0), EngineConfig(k=3, compile="off"))
    failures = iter(range(3))
    prepare = engine.draft.prepare

    def failing(folder: str, version: str) -> Swap:
        if next(failures, None) is not None:
            raise KeyError("of another release")
        return prepare(folder, version)

    monkeypatch.setattr(engine.draft, "prepare", failing)
    loop = EngineLoop(engine).start()
    publish(tmp_path, new_eagle3(target, 1), target)
    watcher = VersionWatcher(loop, tmp_path, poll_s=0.01).start()
    try:
        wait_until(lambda: engine.stats.draft_version == "1")
    finally:
        watcher.stop()
        loop.close()
    assert caplog.text.count("cannot be followed") == 1
