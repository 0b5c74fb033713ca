"""A target rounded to 8 bits is served losslessly: text is that of the rounded target, greedy and
sampled, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.drafters.target import target as target_module
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.products.int8_rows import available
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from tests.integration.served import (
    GREEDY,
    Oracle,
    assert_same,
    enumerated,
    make_drafter,
    near,
    plain_greedy,
    prompts,
)
from tests.integration.test_served_distribution import (
    LENGTH,
    SAMPLING,
    World,
    check,
    engine_of,
    repetitive_prompt,
)

pytestmark = pytest.mark.skipif(not available(), reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def load(tiny_target: Callable[..., str]) -> Callable[[str], Target]:
    """States in float32, so that rounding turns no choice."""

    def get(arch: str) -> Target:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target_module, "states_dtype", lambda: torch.float32)
            return Target.load(tiny_target(arch), dtype=torch.int8)

    return get


def test_speculation_does_not_change_greedy_output(
    load: Callable[[str], Target], tiny_target: Callable[..., str]
) -> None:
    target, batch = load("llama"), prompts(8)
    expected = plain_greedy(target, batch, 24)
    unrounded = plain_greedy(Target.load(tiny_target("llama")), batch, 24)
    # The control: another target writes another text.
    assert any(own[0] != other[0] for own, other in zip(expected, unrounded))
    known = [prompt + tokens for prompt, (tokens, _) in zip(batch, expected)]
    eagle3, draft_lm = (make_drafter(family, target) for family in ("eagle3", "draft-lm"))
    for used in (None, eagle3, Oracle(eagle3, known), Oracle(draft_lm, known)):
        engine = build_engine(target, used, EngineConfig(k=4, max_batch=8))
        completions = engine.generate(batch, GREEDY)
        for completion, right in zip(completions, expected):
            assert_same(completion.tokens, right)
        assert not engine.stats.fallbacks
    assert target.captured
    seen = {accepted for completion in completions for accepted in completion.speculation.accepted}
    assert seen >= {0, 1, 2, 3, 4}


@pytest.mark.long
def test_the_joint_distribution_of_served_tokens_is_the_rounded_targets(
    load: Callable[[str], Target],
) -> None:
    target = load("qwen3")
    prompt = repetitive_prompt(target)
    world = World(target, prompt, enumerated(target, prompt, LENGTH, **SAMPLING))
    check(world, engine_of(world, near(target)))
