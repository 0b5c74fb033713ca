"""Every published layout through the engine, the evaluator, the trainer's loss and doctor; and the
page that says so."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.config import Pair
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.train.check.finding import FAIL
from draftsmith.train.check.models import check_draft
from draftsmith.train.data.batches import collate
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.teacher_forced import evaluate_draft
from draftsmith.train.objective.rounds_of_text import Exponential
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.objective.unrolled_loss import unrolled_loss
from tests.published_drafts import DTYPE, LAYOUTS, PAGE, Layout, page

PROMPTS = [random.Random(seed).choices(range(3, 288), k=7 + 4 * seed) for seed in range(2)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"), dtype=DTYPE)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_published_draft_serves_and_is_evaluated_and_trained(
    layout: Layout, target: Target, tmp_path: Path
) -> None:
    layout.make(target).write(tmp_path)
    drafter = checkpoint.load(tmp_path, target)
    engine = build_engine(target, drafter, EngineConfig(k=3, compile="off"))
    served = [one.tokens for one in engine.generate(PROMPTS, GREEDY, text=False)]
    assert served == target.answer(PROMPTS, max_new_tokens=10, ignore_eos=True)
    assert engine.stats.num_draft_tokens > 0 and not engine.stats.fallbacks

    texts = [torch.tensor(prompt + answer) for prompt, answer in zip(PROMPTS, served)]
    sequences = [
        TokenSequence(f"{at}", text, torch.arange(len(text)) >= len(PROMPTS[at]))
        for at, text in enumerate(texts)
    ]
    found = evaluate_draft(drafter, target, sequences, temperature=0.0, k=3)
    assert 1 <= found.tau.value <= 4

    findings = check_draft(Pair(draft=str(tmp_path)), drafter, target)
    assert not [finding for finding in findings if finding.status == FAIL]

    loss = unrolled_loss(
        drafter, LiveSource(target), collate(sequences), num_steps=3, weighting=Exponential(0.8)
    )
    loss.total.backward()
    trained = {name for name, value in drafter.named_parameters() if value.requires_grad}
    moved = {
        name
        for name, value in drafter.named_parameters()
        if value.grad is not None and value.grad.abs().max() > 0
    }
    # Heads deeper than the unroll are not reached.
    assert moved <= trained and len(moved) > len(trained) // 2
    assert all(
        torch.isfinite(value.grad).all() for value in drafter.parameters() if value.grad is not None
    )


def test_the_page_of_drafts_says_what_these_tests_do() -> None:
    assert PAGE.read_text() == page()
