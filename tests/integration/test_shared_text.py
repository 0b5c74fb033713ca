"""Text that requests share as drafts must not carry one request's draws to another that draws the same (law 2)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from draftsmith.drafters.suffix import Suffix
from draftsmith.drafters.target import Target
from draftsmith.kernels.statistics import g_test
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine import Engine
from draftsmith.serve.request import Request, SamplingParams

NUM_PROMPTS = 1200
ALLOWED = (40, 41, 42, 43)


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"))


def prompts() -> list[list[int]]:
    """Each repeats itself, so that a suffix is always found."""
    found = []
    for number in range(NUM_PROMPTS):
        generator = random.Random(number)
        words = [generator.randrange(50, 280) for _ in range(5)]
        found.append([*words, 40, 41, *words, 40, 42, *words])
    return found


def passes(target: Target, *, count: int) -> list[list[tuple[int, ...]]]:
    """The same prompts with the same seeds, `count` times over on one server."""
    engine = Engine(target, Suffix(), EngineConfig(k=3, max_batch=64, max_length=32, max_round_tokens=2048, max_queue=2000))
    answers = []
    for _ in range(count):
        requests = [
            engine.submit(prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=4, allowed_token_ids=ALLOWED), text=False)
            for seed, prompt in enumerate(prompts())
        ]
        while engine.busy:
            engine.step()
        answers.append([tuple(request.output) for request in requests])
    assert engine.stats.num_accepted_tokens > 100
    return answers


def second_tokens(answers: list[tuple[int, ...]]) -> list[int]:
    counts = Counter(answer[1] for answer in answers)
    return [counts[token] for token in ALLOWED]


def test_a_seed_gives_the_same_tokens_whoever_came_before(target: Target) -> None:
    first, second = passes(target, count=2)
    assert first == second


def test_shared_draws_would_bias_the_second_pass(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with seeded requests sharing their text, a retry is drafted from its own draws."""
    monkeypatch.setattr(Request, "repeatable", False)
    first, second = passes(target, count=2)
    expected = torch.tensor(second_tokens(first), dtype=torch.float64) / NUM_PROMPTS
    assert g_test(torch.tensor(second_tokens(second)), expected).p_value < 1e-5
