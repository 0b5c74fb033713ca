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
from tests.integration.test_greedy_identity import (
    GREEDY,
    Oracle,
    assert_same,
    make_drafter,
    plain_greedy,
    prompts,
    together_as_plain,
)
from tests.integration.test_sampled_distribution import (
    FALSE_ALARM,
    NUM_SAMPLES,
    K,
    enumerated,
    fit,
    make,
    repetitive_prompt,
    start,
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


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_speculation_does_not_change_greedy_output(
    arch: str, load: Callable[[str], Target], tiny_target: Callable[..., str]
) -> None:
    target, batch = load(arch), prompts(8)
    expected = plain_greedy(target, batch, 24)
    unrounded = plain_greedy(Target.load(tiny_target(arch)), batch, 24)
    # The control: another target writes another text.
    assert any(own[0] != other[0] for own, other in zip(expected, unrounded))
    known = [prompt + tokens for prompt, (tokens, _) in zip(batch, expected)]
    plain = build_engine(target, None, EngineConfig()).generate(batch, GREEDY)
    for completion, right in zip(plain, expected):
        assert_same(completion.tokens, right)
    assert target.captured
    for family in ("ngram", "eagle3", "draft-lm"):
        drafter = make_drafter(family, target)
        for used in (drafter, Oracle(drafter, known)):
            together = together_as_plain(target, used, batch, expected)
        seen = {accepted for completion in together for accepted in completion.speculation.accepted}
        assert seen >= {0, 1, 2, 3, 4}


@pytest.mark.long
@pytest.mark.parametrize("family", ["ngram", "draft-lm"])
def test_the_joint_distribution_of_served_tokens_is_the_rounded_targets(
    family: str, load: Callable[[str], Target], live_server: Callable
) -> None:
    target = load("qwen3")
    prompt = repetitive_prompt(target)
    distribution = enumerated(target, prompt)
    server = start(live_server, target, make(family, target))
    found = fit(server, prompt, distribution)
    assert found.p_value > FALSE_ALARM, found
    stats = server.engine.stats
    assert min(stats.offered[depth] for depth in range(K)) > NUM_SAMPLES / 4
    assert not stats.fallbacks
