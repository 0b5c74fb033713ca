"""Hidden states of the target in records: whole ones, whatever a request went through, and enough
for a draft that reads them to learn and to be judged without the target."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.distill.buffer.buffer import BufferWriter
from draftsmith.distill.buffer.record_table import from_table, to_table
from draftsmith.distill.buffer.traffic import OpenRequests, ServedText, known_taps
from draftsmith.distill.command import run
from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.gate.scoring import score_drafters
from draftsmith.distill.gate.sequential import Ledger
from draftsmith.distill.learn.learner import Learner, summary
from draftsmith.distill.learn.teachers import LearningBatch
from draftsmith.distill.monitor.monitor import Monitor
from draftsmith.distill.state import LearnerCounters, LearnerState, StateFolder, TrackState
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.errors import UserError
from draftsmith.kernels.sampling import logged
from draftsmith.record import RoundRecord
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.train.objective.outline import TargetOutline, load_outline
from tests.integration.served import finish

READING = ["eagle3", "mtp", "medusa", "dspark"]  # a family of each kind of unroll
# Its distributions fit into the 64 tokens of a record.
SAMPLING = SamplingParams(temperature=0.5, max_tokens=20, ignore_eos=True)
DRAFTED = ("accepted", "first-rejected")
MOST = 64
BF16 = 2**-8  # relative error of a rounded number


@pytest.fixture(scope="module")
def outline(tiny_target: Callable[..., str]) -> TargetOutline:
    return load_outline(tiny_target("llama"), trust_remote_code=False)


def new_draft(family: str, target: Target) -> TrainedDrafter:
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    made = FAMILIES[family].create(OPTIONS[family](), target, seed=0, token_counts=counts)
    return made.eval()


def prompts(count: int, *, length: int = 9, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 288, (count, length), generator=generator).tolist()


def engine_of(
    target: Target, drafter: TrainedDrafter, sink: object, **options: object
) -> EngineCore:
    config = EngineConfig(**{"k": 3, "seed": 1, "compile": "off", "record_taps": MOST} | options)
    return build_engine(target, drafter, config, sink=sink, draft_version="1")


def texts_of(records: Sequence[RoundRecord]) -> list[ServedText]:
    """As a reader of the buffer has them."""
    return OpenRequests(from_table(to_table(records))).take(idle_s=0.0)


def check_whole(text: ServedText, target: Target, taps: tuple[int, ...], most: int = MOST) -> None:
    """States of every token but the newest, which no pass has read."""
    known = known_taps(text.records, taps)
    assert known is not None and len(known) == min(most, len(text.tokens) - 1)
    ids = torch.tensor([text.tokens])
    expected = target.states(ids, torch.ones_like(ids), taps)[0][0, : len(known)]
    torch.testing.assert_close(known.float(), expected, rtol=2 * BF16, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_round_tokens": 16, "block_size": 4},  # prompts in pieces
        {"num_blocks": 17, "block_size": 4, "max_batch": 3},  # preemptions
        {"tree": "dynamic:nodes=6,depth=3,width=2", "k": 4},
        {"record_taps": 12},
    ],
)
def test_records_hold_the_states_of_every_position(
    target: Target, records: list[RoundRecord], options: dict
) -> None:
    drafter = new_draft("eagle3", target)
    engine = engine_of(target, drafter, records, **options)
    engine.generate(prompts(6), SAMPLING, text=False)
    texts = texts_of(records)
    assert len(texts) == 6 and engine.recorder.num_untapped == 0
    for text in texts:
        check_whole(text, target, drafter.taps, options.get("record_taps", MOST))
    assert {one.taps.layers for one in records if one.taps} == {drafter.taps}
    if "num_blocks" in options:
        assert engine.scheduler.num_preemptions > 0


def test_cached_prefixes_leave_no_hole(target: Target, records: list[RoundRecord]) -> None:
    """Blocks whose states were kept are gone on from; others are read again."""
    drafter = new_draft("eagle3", target)
    engine = engine_of(target, drafter, records, block_size=4)
    (shared,) = prompts(1, length=24)
    asked = [[*shared, *more] for more in prompts(3, length=3, seed=1)]
    unrecorded = replace(SAMPLING, seed=7)  # its blocks come without states
    for prompt, params in zip(asked, (unrecorded, SAMPLING, SAMPLING), strict=True):
        engine.generate([prompt], params, text=False)
    texts = texts_of(records)
    assert len(texts) == 2 and engine.recorder.num_untapped == 0
    for text in texts:
        check_whole(text, target, drafter.taps)
    # The last one found the shared prompt in the cache, but for a block whose key has the token
    # after it.
    assert engine.stats.prefix_cache_hits == len(shared) - 4


def test_a_request_that_pauses_its_drafting_is_read_again_and_recorded_whole(
    target: Target, records: list[RoundRecord]
) -> None:
    drafter = new_draft("eagle3", target)
    engine = engine_of(target, drafter, records)
    (prompt,) = prompts(1)
    request = engine.submit(prompt, SAMPLING)
    for k in (0, 3):
        for _ in range(3):
            engine.step()
        engine.set_k(request, k)
    finish(engine)
    (text,) = texts_of(records)
    assert request.num_preemptions == 1 and engine.recorder.num_untapped == 0
    check_whole(text, target, drafter.taps)


def test_a_draft_that_reads_no_states_has_none_to_record(target: Target) -> None:
    with pytest.raises(UserError, match="record_taps is 64 with a suffix drafter"):
        build_engine(target, Suffix(), EngineConfig(record_taps=64))
    with pytest.raises(UserError, match="record_taps is 64 with no drafter"):
        build_engine(target, None, EngineConfig(record_taps=64))


@pytest.mark.parametrize("family", READING)
def test_a_family_learns_from_records_what_it_learns_from_the_target(
    family: str,
    target: Target,
    outline: TargetOutline,
    records: list[RoundRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same tokens, the same loss and alpha of every depth, and the same draft after some steps,
    up to the rounding of what is recorded: records hold all tokens here. The outline has no weights
    to run."""
    monkeypatch.setattr(logged, "TOP", target.vocab_size)
    engine_of(target, new_draft(family, target), records).generate(prompts(6), SAMPLING, text=False)
    texts = texts_of(records)
    config = LearnConfig(
        lr=1e-3, steps=4, batch=4, replay=0.0, positions=DRAFTED, unroll=LearnUnroll(steps=3)
    )
    from_records = replace(config, teacher="recorded")
    live = Learner(new_draft(family, target), target, config, seed=0)
    recorded = Learner(new_draft(family, target), outline, from_records, seed=0)
    batches = [one.teacher.batch(one._rows(texts, random.Random(0))) for one in (live, recorded)]
    assert batches[1].masked == 0 and batches[0].tokens == batches[1].tokens > 20
    loss, alpha, gradient = step_of(live, batches[0])
    found_loss, found_alpha, found = step_of(recorded, batches[1])
    assert found_loss == pytest.approx(loss, rel=2e-3)
    np.testing.assert_allclose(found_alpha, alpha, atol=2e-3)
    off = float((found - gradient).norm() / gradient.norm())
    # Negative control: a position on, the states are others.
    states = batches[1].source.taps
    states.copy_(states.roll(1, dims=1))
    *_, wrong = step_of(recorded, batches[1])
    assert off < 0.01 < 0.1 < float((wrong - gradient).norm() / gradient.norm())
    assert recorded.update(texts).tokens == live.update(texts).tokens
    assert mean_alpha(recorded, target, texts) == pytest.approx(
        mean_alpha(live, target, texts), abs=0.01
    )
    assert mean_alpha(recorded, outline, texts) == pytest.approx(
        mean_alpha(recorded, target, texts), abs=0.01
    )


def step_of(learner: Learner, batch: LearningBatch) -> tuple[float, list[float], torch.Tensor]:
    """Loss, alpha of each depth, gradient."""
    learner.drafter.zero_grad()
    found = summary(learner.optimizer._backward(batch))
    parts = [one.grad.flatten() for one in learner.parameters.values() if one.grad is not None]
    return *found, torch.cat(parts)


def mean_alpha(learner: Learner, judge: Target, texts: Sequence[ServedText]) -> float:
    found = score_drafters([learner.drafter], judge, texts, max_depth=3, max_length=MOST)[0]
    return float(np.concatenate([one.alpha for one in found]).mean())


def serve_into(loop: Any, count: int, *, seed: int = 0, **options: object) -> None:
    writer = BufferWriter(loop.config.buffer, flush_s=60.0, flush_records=10**6)
    engine = engine_of(loop.target, loop.draft, writer, seed=seed, **options)
    engine.generate(prompts(count, seed=seed), SAMPLING, text=False)
    writer.close()


def test_a_learner_goes_on_after_a_restart_with_the_states_it_holds(
    target: Target, outline: TargetOutline, records: list[RoundRecord], tmp_path: Path
) -> None:
    engine_of(target, new_draft("eagle3", target), records).generate(
        prompts(6), SAMPLING, text=False
    )
    texts = texts_of(records)
    config = LearnConfig(teacher="recorded", steps=2, batch=4, replay=0.5, positions=DRAFTED)

    def new_learner() -> Learner:
        return Learner(new_draft("eagle3", target), outline, config, seed=0)

    first = new_learner()
    first.update(texts[:4])
    kept = first.reservoir
    texts_of_track = [], texts[4:], kept.texts, kept.latest
    track = TrackState(1, False, Ledger(), {}, first.steps, 1, kept.seen, *texts_of_track)
    state = LearnerState("now", [], {}, LearnerCounters(), Monitor(1e-6), track, [])
    StateFolder(tmp_path).save(first, state)
    again, moved = new_learner(), new_learner()
    restored = StateFolder(tmp_path).restore(again, target_revision="now")
    assert restored is not None
    assert [one.tap_bytes for one in restored.track.window] == [one.tap_bytes for one in texts[4:]]
    assert again.update(texts[4:]).loss == first.update(texts[4:]).loss
    # States of earlier weights are not read under new ones.
    StateFolder(tmp_path).restore(moved, target_revision="new")
    assert len(moved.reservoir.texts) == 4
    assert not any(one.tap_bytes for one in moved.reservoir.texts)


def test_records_without_states_are_refused_at_the_start_and_left_out_later(
    loop: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    made = loop("eagle3")
    config = replace(made.config, learn=replace(made.config.learn, teacher="recorded", steps=2))
    serve_into(made, 4, record_taps=0)
    sentence = (
        r"hold no hidden states, and the draft reads layers [0-9, ]+; serve with --record-taps"
    )
    with pytest.raises(UserError, match=sentence):
        run(config)
    # The newest records decide: older ones are left out, and counted.
    time.sleep(0.002)  # shards are named by the millisecond
    serve_into(made, 8, seed=1)
    assert run(config) == 0
    status = made.status()
    assert status["untapped"] == 4 and status["texts"] + status["held_out"] == 8
    assert "records without the target's states of layers" in (capsys.readouterr().err)
