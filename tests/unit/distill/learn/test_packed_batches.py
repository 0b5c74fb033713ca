"""A learner's packed batches: the loss and every gradient of padded ones, with fewer positions
computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith.distill.buffer.traffic import TrainedRow
from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.learn import teachers
from draftsmith.distill.learn.learner import CandidateOptimizer, trained
from draftsmith.distill.learn.teachers import (
    DraftedSpan,
    LearningBatch,
    LearningRow,
    LiveTeacher,
    RecordedTeacher,
)
from draftsmith.distill.learn.text_states import TextStates
from draftsmith.drafters.options import OPTIONS, DraftLmOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.record import RecordedTaps
from draftsmith.train.objective.outline import load_outline
from tests.noise import noisy
from tests.round_records import of_logits, round_record

LENGTHS = (17, 5, 2, 30, 9, 1, 12, 30, 8)
FAMILIES_HERE = ("eagle3", "draft-lm", "dflash", "medusa")


@pytest.fixture(scope="module")
def exact(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"), dtype=torch.float64)


def drafter_of(family: str, target: Target) -> torch.nn.Module:
    options = OPTIONS[family]() if family != "draft-lm" else DraftLmOptions(hidden_size=32)
    drafter = FAMILIES[family].create(options, target, seed=0).to(torch.float64)
    return noisy(drafter, 2, 0.05)  # parts that begin at zero would hide what flows through them


def texts() -> list[TrainedRow]:
    """The first third of each is a prompt."""
    chance = np.random.default_rng(0)
    rows = []
    for size in LENGTHS:
        weights = chance.random(size, dtype=np.float32) + 0.1
        weights[: 1 + size // 3] = 0
        rows.append(TrainedRow(chance.integers(3, 288, size).tolist(), weights))
    return rows


def recorded(row: TrainedRow, target: Target, layers: tuple[int, ...]) -> LearningRow:
    """The text as one round, whose record lacks the states of the last five positions."""
    ids = torch.tensor([row.tokens])
    taps, hidden = target.states(ids, torch.ones_like(ids), layers)
    known = max(1, len(row.tokens) - 5)
    bits = taps[0, :known].to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    record = round_record(
        context=row.tokens[:1], drafted=row.tokens[1:], accepted=len(row.tokens) - 1,
        committed=row.tokens[1:], emitted=0, taps=RecordedTaps(layers, 0, bits),
        p=of_logits(target.head(hidden[0]), 16)[:-1],
    )  # fmt: skip
    return LearningRow(row, [DraftedSpan(record, 0, len(record.committed))], [record])


def found(drafter: torch.nn.Module, batch: LearningBatch) -> list[torch.Tensor]:
    """Loss, trained weight of each step, and every gradient."""
    config = LearnConfig(unroll=LearnUnroll(steps=3), dtype="float32")
    text = replace(batch.text, weights=batch.text.weights.double())
    unrolled = CandidateOptimizer(drafter, config).unrolled(batch._replace(text=text))
    gradients = torch.autograd.grad(
        unrolled.total, list(trained(drafter).values()), allow_unused=True, materialize_grads=True
    )
    return [unrolled.total.detach(), unrolled.sums.weight, unrolled.sums.alpha, *gradients]


def alone(rows: Sequence[LearningRow]) -> list[list[int]]:
    return [[at] for at in range(len(rows))]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> bool:
    return all(
        torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("kind", ["live", "recorded"])
@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_packed_rows_train_what_padded_ones_do(
    tiny_target: Callable[..., str],
    exact: Target,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    kind: str,
) -> None:
    drafter = drafter_of(family, exact)
    if kind == "live":
        teacher = LiveTeacher(exact, TextStates(exact, 1 << 30))
        rows = [LearningRow(row, []) for row in texts()]
    else:
        outline = load_outline(tiny_target("llama"), trust_remote_code=False)
        teacher = RecordedTeacher(outline, drafter.taps)
        rows = [recorded(row, exact, drafter.taps or (1,)) for row in texts()]
    packed = teacher.batch(rows)
    monkeypatch.setattr(teachers, "arranged", alone)
    padded = teacher.batch(rows)
    assert packed.text.segments is not None and padded.text.segments is None
    assert (packed.tokens, packed.masked) == (padded.tokens, padded.masked)
    assert packed.tokens > 40 and (packed.masked > 0) == (kind == "recorded" and drafter.taps != ())
    assert packed.text.input_ids.numel() < 0.6 * padded.text.input_ids.numel()
    # Stored distributions and states are float32 and bfloat16, alike in both.
    tolerance = 1e-9 if kind == "live" else 1e-6
    ours, theirs = found(drafter, packed), found(drafter, padded)
    assert same(ours, theirs, tolerance)
    # Negative control: texts that saw each other.
    mixed = packed._replace(text=replace(packed.text, segments=None))
    assert not same(found(drafter, mixed), theirs, 1e-3)


def test_each_text_of_a_packed_row_has_the_states_of_a_pass_of_its_own(exact: Target) -> None:
    rows = [LearningRow(row, []) for row in texts()]
    states = TextStates(exact, 1 << 30)
    batch = LiveTeacher(exact, states).batch(rows)
    taps, hidden = states.states(
        batch.text.input_ids, batch.text.attention_mask, (1, 2), batch.text.segments
    )
    assert taps is not None and states.num_read == len(rows)
    for places, tapped, last in zip(teachers.arranged(rows), taps, hidden, strict=True):
        begin = 0
        for at in places:
            ids = torch.tensor([rows[at].row.tokens])
            end = begin + ids.shape[1]
            both = exact.states(ids, torch.ones_like(ids), (1, 2))
            assert torch.equal(tapped[begin:end], both[0][0])
            assert torch.equal(last[begin:end], both[1][0])
            begin = end
        assert not last[begin:].any() and not tapped[begin:].any()
