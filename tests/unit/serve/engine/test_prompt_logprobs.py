"""Log-probabilities of the prompt: the target's own, however the prompt is fed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams

PROMPT = [(7 * i + 3) % 200 + 5 for i in range(45)]
JUDGED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(target: Target) -> torch.Tensor:
    """[45 - 1, V] float32: the distribution of every prompt token but the first."""
    with torch.inference_mode():
        _, hidden = target.states(torch.tensor([PROMPT]), torch.ones(1, len(PROMPT)), ())
        return torch.log_softmax(target.head(hidden[0, :-1]).float(), dim=-1)


def check(told: list[Any], expected: torch.Tensor) -> None:
    assert [entry.token for entry in told] == PROMPT[1:]
    for entry, distribution in zip(told, expected):
        assert entry.logprob == pytest.approx(float(distribution[entry.token]), abs=1e-4)
        best = torch.topk(distribution, 2)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"max_round_tokens": 16}, {"max_round_tokens": 16, "block_size": 4}]
)
@pytest.mark.parametrize("drafts", [False, True])
def test_they_are_the_targets_in_whole_or_in_pieces(
    options: dict, drafts: bool, target: Target, fixed_drafter: Callable, expected: torch.Tensor
) -> None:
    engine = build_engine(target, fixed_drafter() if drafts else None, EngineConfig(k=2, **options))
    other = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    # Among others, which take part in the same passes.
    engine.submit(PROMPT[:9], other)
    request = engine.submit(PROMPT, JUDGED)
    engine.submit(PROMPT[3:], other)
    while engine.busy:
        engine.step()
    check(request.prompt_logprobs, expected)
    assert len(request.logprobs) == 3


def test_a_cached_prefix_is_read_again_for_them(target: Target, expected: torch.Tensor) -> None:
    engine = build_engine(target, None, EngineConfig(block_size=4))
    engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=3))
    first = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=3))[0]
    assert engine.stats.prefix_cache_hits > 0 and first.prompt_logprobs == []
    check(engine.generate([PROMPT], JUDGED)[0].prompt_logprobs, expected)


def test_a_preempted_request_keeps_and_completes_them(
    target: Target, expected: torch.Tensor
) -> None:
    engine = build_engine(
        target, None, EngineConfig(block_size=4, num_blocks=20, max_round_tokens=4)
    )
    first = engine.submit(
        PROMPT[:20], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    )
    request = engine.submit(
        PROMPT, SamplingParams(temperature=0, max_tokens=10, prompt_logprobs=2, ignore_eos=True)
    )
    kept = 0
    while engine.busy:
        if engine.scheduler.num_preemptions == 0:
            kept = len(request.prompt_logprobs)
        engine.step()
    assert 0 < kept < len(PROMPT) - 1, "it was to be preempted while its prompt was read"
    assert first.finished and request.num_preemptions > 0, "the pool was to be too small for both"
    check(request.prompt_logprobs, expected)


def test_a_prompt_of_one_token_has_none(target: Target) -> None:
    assert (
        build_engine(target, None, EngineConfig()).generate([[5]], JUDGED)[0].prompt_logprobs == []
    )
