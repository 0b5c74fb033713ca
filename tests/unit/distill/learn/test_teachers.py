"""Recorded distributions in the place of the target's pass: the same gradient where they are whole,
nothing where there are none."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith.distill.buffer.record_table import tokens_only
from draftsmith.distill.buffer.traffic import Role, ServedText, TrainedRow, chosen
from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.learn.learner import Learner
from draftsmith.distill.learn.teachers import (
    DraftedSpan,
    LearningBatch,
    LearningRow,
    RecordedTeacher,
    arranged,
)
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.record import NOTHING, RecordedTaps, RoundRecord
from draftsmith.train.objective.outline import TargetOutline, load_outline
from tests.round_records import Distribution, each, logged, of_logits, round_record, served_text

EVERYWHERE = ("accepted", "first-rejected", "bonus", "later-rejected")
ONE_STEP = LearnUnroll(steps=1)


@pytest.fixture(scope="module")
def exact(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"), dtype=torch.float64)


@pytest.fixture(scope="module")
def outline(tiny_target: Callable[..., str]) -> TargetOutline:
    return load_outline(tiny_target("llama"), trust_remote_code=False)


@pytest.fixture(scope="module")
def served(exact: Target, bigram: Callable, texts_by: Callable) -> list[ServedText]:
    texts = texts_by(exact, bigram(288).double(), 4, max_tokens=12)
    return [
        served_text(with_whole(record, text.tokens, exact) for record in text.records)
        for text in texts
    ]


def with_whole(record: RoundRecord, text: list[int], target: Target) -> RoundRecord:
    """The record with all of its distributions' tokens."""
    tokens = torch.tensor([[*text[: record.position], *record.drafted]])
    logits = target.model(tokens).logits[0, record.position - 1 : -1]
    return replace(record, p=of_logits(logits, 288))


def gradient(learner: Learner, batch: LearningBatch) -> tuple[float, torch.Tensor]:
    learner.drafter.zero_grad()
    sums = learner.optimizer._backward(batch)
    return float(sums.divergence.sum()), learner.drafter.head.grad.clone()


@pytest.mark.parametrize("divergence", ["forward-kl", "reverse-kl", "tv", "lk-alpha"])
def test_whole_recorded_distributions_give_the_gradient_of_the_target(
    exact: Target, outline: Target, bigram: Callable, served: list[ServedText], divergence: str
) -> None:
    config = LearnConfig(divergence=divergence, positions=EVERYWHERE, unroll=ONE_STEP, replay=0.0)
    recorded = Learner(bigram(288).double(), outline, replace(config, teacher="recorded"), seed=0)
    live = Learner(bigram(288).double(), exact, config, seed=0)
    rows = recorded._rows(served, random.Random(0))
    batch = recorded.teacher.batch(rows)
    # Everything but the token behind a fully accepted draft.
    assert batch.masked == sum(int((text.roles == Role.BONUS).sum()) for text in served) > 0
    assert any(len(one.spans) == 1 and one.row.weights.any() for one in rows)  # branches too
    known = [
        one._replace(row=one.row._replace(weights=weights))
        for one, weights in zip(rows, weights_by_text(rows, batch), strict=True)
    ]
    assert batch.tokens == live.teacher.batch(known).tokens > 20
    loss, found = gradient(recorded, batch)
    expected_loss, expected = gradient(live, live.teacher.batch(known))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)
    # Negative control: one position on, the distributions are others.
    later = [
        one._replace(spans=[span._replace(record=moved(span.record)) for span in one.spans])
        for one in known
    ]
    wrong = gradient(recorded, recorded.teacher.batch(later))
    assert wrong[0] != pytest.approx(expected_loss, rel=1e-3)


def weights_by_text(rows: list[LearningRow], batch: LearningBatch) -> list[np.ndarray]:
    """Weights of each text in the batch's rows."""
    found = {}
    for texts, weights in zip(arranged(rows), batch.text.weights.numpy(), strict=True):
        for at in texts:
            found[at], weights = np.split(weights, [len(rows[at].row.tokens)])[:2]
    return [found[at] for at in range(len(rows))]


def moved(record: RoundRecord) -> RoundRecord:
    return replace(record, p=logged(*each(record.p[1:]), *each(record.p[:1])))


def distribution(width: int, *, likeliest: int = 0) -> Distribution:
    (found,) = each(of_logits(torch.linspace(3, 0, 288)[None].roll(likeliest, dims=1), width))
    return found


def round_of(p: list[Distribution], *, accepted: int, committed: int, drafted: int) -> RoundRecord:
    return round_record(
        temperature=0.7, top_k=5, top_p=0.9, position=2, context=[5, 6],
        drafted=[7] * drafted, accepted=accepted, committed=[7] * committed, emitted=7, p=logged(*p),
    )  # fmt: skip


def test_positions_without_a_recorded_distribution_are_masked(outline: Target) -> None:
    teacher, whole = RecordedTeacher(outline), distribution(64)

    def weights(record: RoundRecord, end: int) -> list[float]:
        row = TrainedRow([5, 6, 7, 7, 7, 7, 7], np.array([0, 0, 1, 1, 1, 1, 1], dtype=np.float32))
        return (
            teacher.batch([LearningRow(row, [DraftedSpan(record, 0, end)])])
            .text.weights[0]
            .tolist()
        )

    rejected = round_of([whole] * 4, accepted=2, committed=3, drafted=4)
    # Behind the first rejected token the text is another; the sampling of the request is no matter.
    assert weights(rejected, 3) == [0, 0, 1, 1, 1, 0, 0]
    # A penalty, a ban or a grammar: no distributions.
    assert weights(replace(rejected, p=NOTHING), 3) == [0] * 7
    assert weights(tokens_only(rejected), 3) == [0] * 7
    # Some engines log nothing of single positions, or what is not this target's.
    empty, foreign = Distribution(), Distribution([9, 288], [-0.7, -0.7], 0.0)
    assert weights(replace(rejected, p=logged(whole, empty, whole)), 3) == [0, 0, 1, 0, 1, 0, 0]
    assert weights(replace(rejected, p=logged(foreign, whole)), 3) == [0, 0, 0, 1, 0, 0, 0]
    nothing = teacher.batch([LearningRow(TrainedRow([5, 6], np.zeros(2, np.float32)), [])])
    assert nothing.tokens == 0 and nothing.masked == 0


def test_a_narrow_distribution_among_wide_ones_keeps_its_tail(
    outline: Target, bigram: Callable
) -> None:
    """What fills it up must not be taken for token 0."""
    teacher, config = RecordedTeacher(outline), LearnConfig(teacher="recorded", unroll=ONE_STEP)
    row = TrainedRow([5, 6, 7, 7], np.array([0, 0, 1, 0], dtype=np.float32))
    narrow, losses = distribution(4, likeliest=9), []
    for p in ([narrow], [narrow, distribution(64)]):
        record = round_of(p, accepted=len(p), committed=len(p), drafted=len(p))
        batch = teacher.batch([LearningRow(row, [DraftedSpan(record, 0, len(p))])])
        changed = replace(config, divergence="reverse-kl")
        losses.append(gradient(Learner(bigram(288), outline, changed, seed=0), batch))
    assert losses[0][0] == losses[1][0] and torch.equal(losses[0][1], losses[1][1])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"divergence": "ce"}, "option 'learn.divergence' needs whole distributions"),
        ({"positions": ("bonus",)}, "learn.positions is 'bonus' alone"),
    ],
)
def test_what_records_cannot_give_is_refused(
    outline: Target, bigram: Callable, changes: dict, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        Learner(bigram(288), outline, LearnConfig(teacher="recorded", **changes), seed=0)
    Learner(bigram(288), outline, LearnConfig(**changes), seed=0)


def test_rejected_continuations_of_a_draft_that_reads_states_are_refused(
    exact: Target, outline: Target
) -> None:
    head = FAMILIES["eagle3"].create(Eagle3Options(), exact, seed=0)
    config = LearnConfig(teacher="recorded", positions=EVERYWHERE)
    with pytest.raises(UserError, match="'later-rejected' with learn"):
        Learner(head, outline, config, seed=0)
    Learner(head, exact, replace(config, teacher="live"), seed=0)


def test_a_text_is_trained_as_far_as_its_states_go(exact: Target, outline: Target) -> None:
    """Positions behind the last known state count as masked, as those without distributions do."""
    taps, width = (1, 2), 2 * exact.hidden_size
    teacher = RecordedTeacher(outline, taps)
    record = round_of([distribution(64)] * 4, accepted=4, committed=5, drafted=4)
    row = TrainedRow([5, 6, 7, 7, 7, 7, 7], np.array([0, 0, 1, 1, 1, 1, 0], dtype=np.float32))
    values = np.arange(7 * width, dtype=np.uint16).reshape(7, width)

    def batch(*known: RecordedTaps | None) -> LearningBatch:
        records = [replace(record, round=at, taps=one) for at, one in enumerate(known)]
        return teacher.batch([LearningRow(row, [DraftedSpan(record, 0, 4)], records)])

    whole = batch(RecordedTaps(taps, 0, values[:2]), RecordedTaps(taps, 2, values[2:6]))
    assert (whole.tokens, whole.masked) == (4, 0)
    read = whole.source.read(whole.text, taps).taps
    assert read.shape == (1, 7, width) and not read[0, 6].any()
    expected = torch.from_numpy(values[:6].view(np.int16)).view(torch.bfloat16).float()
    assert torch.equal(read[0, :6], expected)
    # A hole ends what is known, and so does a record of other layers.
    cut = batch(RecordedTaps(taps, 0, values[:3]), RecordedTaps(taps, 4, values[4:6]))
    assert (cut.tokens, cut.masked, cut.text.input_ids.shape[1]) == (2, 2, 4)
    other = batch(RecordedTaps((0, 3), 0, values[:6]))
    assert (other.tokens, other.masked) == (0, 4)
    assert teacher.reads([replace(record, taps=RecordedTaps(taps, 0, values))])
    assert not teacher.reads([record])
    # The layers that are asked for, in their order.
    wider = RecordedTaps((2, 3, 1), 0, np.arange(3 * 4, dtype=np.uint16).reshape(2, 6))
    assert chosen(wider, taps).tolist() == [[4, 5, 0, 1], [10, 11, 6, 7]]
