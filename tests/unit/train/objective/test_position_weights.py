"""Weights of depths against loops over rounds, in float64; the loss they make against plain
autograd."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import DraftLmOptions, Eagle3Options, MedusaOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.train.config import UnrollConfig
from draftsmith.train.objective.rounds_of_text import (
    DepthStats,
    DPace,
    ExpectedPrefix,
    Exponential,
    folded,
    step_weighting,
)
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.objective.unrolled_loss import unrolled_loss
from draftsmith.train.trainer import Trainee, num_items_of
from tests.unrolled import unroll_batch

ROWS, LENGTH, DEPTHS = 2, 7, 4
ADAPTIVE = ["expected-prefix", "d-pace"]


def judged(seed: int = 0) -> DepthStats:
    """A prompt of two tokens, a hole in the middle, a short second row."""
    generator = torch.Generator().manual_seed(seed)
    keep, confidence = torch.rand(2, ROWS, LENGTH, DEPTHS, generator=generator, dtype=torch.float64)
    trained = torch.ones(ROWS, LENGTH, DEPTHS, dtype=torch.bool)
    trained[:, :2], trained[0, 4], trained[1, 5:] = False, False, False
    begun = torch.arange(LENGTH)[:, None] >= torch.arange(DEPTHS)
    return DepthStats(keep, confidence, trained, begun)


def factors(weighting, known: DepthStats) -> torch.Tensor:
    like = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    return weighting.factors(like, DEPTHS, lambda: known).expand(ROWS, LENGTH, DEPTHS)


def in_rounds():
    """(row, position, depth) of every drafted token whose round begins inside the text."""
    for row in range(ROWS):
        for position in range(LENGTH):
            for depth in range(min(DEPTHS, position + 1)):
                yield row, position, depth


def test_the_expected_prefix_is_the_product_of_what_was_kept_before():
    known = judged()
    weights = factors(ExpectedPrefix(), known)
    for row, position, depth in in_rounds():
        expected = 1.0
        for before in range(depth):
            at = row, position - depth + before, before
            expected *= float(known.keep[at]) if known.known[at] else 1.0
        assert weights[row, position, depth] == pytest.approx(max(expected, 1e-6), rel=1e-12)


def test_d_pace_is_the_derivative_of_the_expected_length_by_the_log_of_the_confidence():
    known = judged()
    weights = factors(DPace(), known)
    compared = 0
    for row, position, depth in in_rounds():
        first = position - depth
        trained = [
            first + s < LENGTH and bool(known.known[row, first + s, s]) for s in range(DEPTHS)
        ]
        if not trained[depth]:
            continue  # its weight is not read
        chances = [
            0.5 * float(known.confidence[row, first + s, s]) + 0.5 if trained[s] else 1.0
            for s in range(DEPTHS)
        ]
        logs = torch.tensor(chances, dtype=torch.float64).log().requires_grad_()
        length = (logs.cumsum(0).exp() * torch.tensor(trained)).sum()
        expected = torch.autograd.grad(length, logs)[0][depth]
        assert weights[row, position, depth] == pytest.approx(float(expected), rel=1e-12)
        compared += 1
    assert compared > 10


def test_a_step_that_stands_for_several_depths_gets_their_weights():
    given_factors = torch.tensor([1.0, 0.5, 0.25, 0.125])
    assert torch.equal(folded(given_factors, 4), given_factors)
    assert torch.equal(folded(given_factors, 2), torch.tensor([1.0, 0.875]))
    assert torch.equal(folded(given_factors, 1), torch.tensor([1.875]))


def text(seed: int, rows: int = 2) -> TextBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 288, (rows, 9), generator=generator)
    weights = torch.rand(rows, 9, generator=generator).double()
    weights[:, :2], weights[0, 5] = 0.0, 0.0
    return TextBatch(input_ids=ids, attention_mask=torch.ones_like(ids), weights=weights)


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return Target.load(tiny_target("llama"), dtype=torch.float64)


def by_hand(drafter, target: Target, batch: TextBatch, name: str) -> torch.Tensor:
    """Forward KL, round by round, with the weights left out of the gradient."""
    _, hidden = target.states(batch.input_ids, batch.attention_mask, ())
    p = target.head(hidden).softmax(dim=-1)
    unroll = unroll_batch(drafter, target, batch.input_ids, DEPTHS)
    q = [(step.hidden @ drafter.head_weight().T).softmax(dim=-1) for step in drafter.unroll(unroll)]
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch.input_ids)):
        for first in range(2, 9):
            positions = range(first, min(first + DEPTHS, 9))
            distributions = [
                (p[row, at - 1], q[depth][row, at - 2]) for depth, at in enumerate(positions)
            ]
            tokens = [int(batch.input_ids[row, at]) for at in positions]
            total = total + of_round(
                distributions, tokens, [float(batch.weights[row, at]) for at in positions], name
            )
    return total


def of_round(
    distributions: list[tuple[torch.Tensor, torch.Tensor]],
    tokens: list[int],
    weights: list[float],
    name: str,
) -> torch.Tensor:
    chances = []
    for (target_distribution, draft_distribution), token, weight in zip(
        distributions, tokens, weights
    ):
        keep, smooth = (
            min(1.0, float(draft_distribution[token].detach() / target_distribution[token])),
            0.5 * float(draft_distribution[token].detach()) + 0.5,
        )
        chances.append(1.0 if weight == 0 else keep if name == "expected-prefix" else smooth)
    total = torch.zeros((), dtype=torch.float64)
    for depth, (target_distribution, draft_distribution) in enumerate(distributions):
        if name == "expected-prefix":
            factor = max(math.prod(chances[:depth]), 1e-6)
        else:
            factor = sum(
                math.prod(chances[: m + 1])
                for m in range(depth, len(distributions))
                if weights[m] > 0
            )
        total = (
            total
            + factor
            * weights[depth]
            * (target_distribution * (target_distribution.log() - draft_distribution.log())).sum()
        )
    return total


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_weighted_loss_and_its_gradient_equal_the_plain_computation(
    name, target, table_drafter
):
    drafter, batch = table_drafter(288).double(), text(0)
    unrolled = unrolled_loss(
        drafter, LiveSource(target), batch, num_steps=DEPTHS, weighting=step_weighting(name, 0.8)
    )
    expected = by_hand(drafter, target, batch, name)
    assert unrolled.total.item() == pytest.approx(expected.item(), rel=1e-9)
    ours = torch.autograd.grad(unrolled.total, [drafter.table, drafter.head])
    theirs = torch.autograd.grad(expected, [drafter.table, drafter.head])
    for one, other in zip(ours, theirs):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-10)
    # Negative control: the same comparison fails when every depth counts alike.
    alike = unrolled_loss(
        drafter,
        LiveSource(target),
        batch,
        num_steps=DEPTHS,
        weighting=step_weighting("uniform", 0.8),
    )
    assert abs(alike.total.item() - expected.item()) > 1e-3


@pytest.mark.parametrize("family", ["eagle3", "draft-lm", "medusa"])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_packed_texts_weigh_what_they_weigh_apart(name, family, target):
    """Also where a language model's one step stands for rounds that would have begun in the text
    before."""
    options = {
        "eagle3": Eagle3Options(),
        "draft-lm": DraftLmOptions(num_layers=1, hidden_size=32),
        "medusa": MedusaOptions(),
    }
    drafter = FAMILIES[family].create(options[family], target, seed=0).to(torch.float64)
    sizes = (7, 3, 9)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 288, (size,), generator=generator) for size in sizes]
    weights = [
        (torch.rand(size, generator=generator) * (torch.arange(size) >= 2)).double()
        for size in sizes
    ]

    def total(text: TextBatch) -> float:
        teacher, weighting = LiveSource(target), step_weighting(name, 0.8)
        return unrolled_loss(
            drafter, teacher, text, num_steps=DEPTHS, weighting=weighting
        ).total.item()

    def one_row(
        ids: torch.Tensor, weights: torch.Tensor, segments: torch.Tensor | None
    ) -> TextBatch:
        mask = torch.ones_like(ids)[None]
        return TextBatch(
            input_ids=ids[None], attention_mask=mask, weights=weights[None], segments=segments
        )

    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))[None]
    packed = total(one_row(torch.cat(ids), torch.cat(weights), numbers))
    apart = sum(total(one_row(one, weight, None)) for one, weight in zip(ids, weights))
    assert packed == pytest.approx(apart, rel=1e-9)
    # Negative control: read as one text they weigh something else.
    assert total(one_row(torch.cat(ids), torch.cat(weights), None)) != pytest.approx(
        apart, rel=1e-3
    )


def test_a_language_models_token_counts_for_every_round_that_reaches_it(target):
    """Weights by hand: position j is at depth s of the round that began at j - s, all with the same
    step of the unroll."""
    drafter = (
        FAMILIES["draft-lm"]
        .create(DraftLmOptions(num_layers=1, hidden_size=32), target, seed=0)
        .to(torch.float64)
    )
    batch = text(3, rows=1)
    alone = unrolled_loss(
        drafter, LiveSource(target), batch, num_steps=1, weighting=Exponential(1.0)
    )
    deep = unrolled_loss(
        drafter, LiveSource(target), batch, num_steps=3, weighting=ExpectedPrefix()
    )
    chances = [float(alone.keep[0, at, 0]) if batch.weights[0, at] > 0 else 1.0 for at in range(9)]
    expected = 0.0
    for at in range(9):
        single = replace(batch, weights=batch.weights * (torch.arange(9) == at))
        value = unrolled_loss(
            drafter, LiveSource(target), single, num_steps=1, weighting=Exponential(1.0)
        ).total.item()
        expected += value * sum(
            max(math.prod(chances[at - depth : at]), 1e-6) for depth in range(3)
        )
    assert deep.total.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("mean", ["token", "sample"])
@pytest.mark.parametrize("name", ["d-pace", "exponential"])
def test_token_and_sample_means_are_the_same_packed_apart_and_accumulated(name, mean, target):
    """Three texts: a row each, all in one row, and one pass each, divided by what all of them
    count."""
    drafter = FAMILIES["eagle3"].create(Eagle3Options(), target, seed=0).to(torch.float64)
    trainee = Trainee(drafter, LiveSource(target), UnrollConfig(steps=3, weights=name), mean=mean)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 288, (size,), generator=generator) for size in (9, 4, 12)]
    labels = [torch.where(torch.arange(len(one)) >= 2, one, -100) for one in ids]

    def passed(
        input_ids: torch.Tensor, labels: torch.Tensor, segments: torch.Tensor | None = None
    ) -> TextBatch:
        return TextBatch(
            input_ids=input_ids,
            attention_mask=(input_ids > 0).long(),
            weights=(labels != -100).float(),
            segments=segments,
        )

    apart = [passed(one[None], label[None]) for one, label in zip(ids, labels)]
    rows = passed(
        *(
            pad_sequence(each, batch_first=True, padding_value=value)
            for each, value in ((ids, 0), (labels, -100))
        )
    )
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor([len(one) for one in ids]))
    packed = passed(torch.cat(ids)[None], torch.cat(labels)[None], numbers[None])

    def loss(passes: list[TextBatch]) -> float:
        count = torch.stack([num_items_of(text, mean) for text in passes]).sum()
        return sum(
            float(trainee(text, num_items_in_batch=count)["loss"].detach()) for text in passes
        )

    # The weights of tokens are float32.
    assert loss([rows]) == pytest.approx(loss(apart), rel=1e-6) and loss([packed]) == pytest.approx(
        loss(apart), rel=1e-6
    )
