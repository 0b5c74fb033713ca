"""Hidden states of texts: those of the target's pass, each text read once, in any company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.gate.scoring import Scorer
from draftsmith.distill.learn.learner import Learner
from draftsmith.distill.learn.text_states import TextStates
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.batches import mask_of, padded
from draftsmith.train.objective.teacher import LiveSource
from tests.peak_memory import Memory

TAPS = (0, 1)
GENEROUS = 1 << 30


@pytest.fixture
def texts() -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return [torch.randint(3, 288, (size,), generator=chance) for size in (5, 17, 9, 30)]


@pytest.fixture
def served(served_texts: Callable[[int], list[ServedText]]) -> list[ServedText]:
    return served_texts(12)


def read(
    states: TextStates | Target, texts: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return states.states(padded(texts), mask_of(texts), TAPS)


def test_a_step_in_bfloat16_reads_what_a_score_reads(
    target: Target, texts: list[torch.Tensor]
) -> None:
    expected = read(TextStates(target, GENEROUS), texts)
    with torch.autocast("cpu", torch.bfloat16):
        found = read(TextStates(target, GENEROUS), texts)
        other = read(target, texts)[1]
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(other[mask_of(texts).bool()], found[1][mask_of(texts).bool()])


def test_a_text_is_read_once_and_alike_in_any_company(
    target: Target, texts: list[torch.Tensor]
) -> None:
    states, others = TextStates(target, GENEROUS), TextStates(target, GENEROUS)
    whole = read(states, texts)
    assert states.num_read == 4
    # In pairs, so that every text is padded to another width, and in another order.
    for part in ([3, 0], [2, 1], [1]):
        for found, expected in zip(
            read(others, [texts[index] for index in part]), whole, strict=True
        ):
            for row, index in enumerate(part):
                size = len(texts[index])
                assert torch.equal(found[row, :size], expected[index, :size])
    assert others.num_read == 4
    read(states, texts)
    assert states.num_read == 4
    states.states(padded(texts), mask_of(texts), (1,))
    assert states.num_read == 8, "other taps are not known"
    states.forget()
    read(states, texts[:1])
    assert states.num_read == 9


def test_training_and_gate_share_one_pass_a_text(
    target: Target, bigram: Callable, served: list[ServedText]
) -> None:
    config = LearnConfig(lr=1e-2, unroll=LearnUnroll(steps=1), replay=0.5, batch=4, dtype="float32")
    states, weights = TextStates(target, GENEROUS), []
    for reader in (states, target):
        learner = Learner(bigram(288), target, config, seed=0, states=states)
        learner.teacher.source = LiveSource(target, reader)
        learner.update(served[:6])
        learner.update(served[6:])
        weights.append(learner.drafter.head.detach().clone())
    assert states.num_read == len(served), "though each is trained on in several steps"
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-5)
    plain = Scorer(learner.drafter, target, max_length=512).score(served, max_depth=3)
    scorer = Scorer(learner.drafter, target, max_length=512, states=states)
    for one in (scorer, scorer.of(learner.drafter)):
        scored = one.score(served, max_depth=3)
        for found, expected in zip(scored, plain, strict=True):
            assert found.alpha == pytest.approx(expected.alpha, abs=1e-5)
    assert states.num_read == len(served)


def test_no_more_than_the_limit_is_held(target: Target) -> None:
    """Counted over the tensors themselves, whatever is told of them."""
    each = 20 * 3 * target.hidden_size * 4
    states = TextStates(target, 3.5 * each)
    chance = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 288, (20,), generator=chance) for _ in range(12)]

    def read_all() -> None:
        for text in texts:
            read(states, [text])

    read(states, texts[:1])  # what the model keeps of its own
    with Memory() as memory:
        read_all()
    assert 3 * each <= states.num_bytes <= 3.5 * each
    assert 3 * each <= memory.live < 4 * each
