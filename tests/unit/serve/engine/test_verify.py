"""Rounds decided by the compiled kernels on a CPU: the tokens of torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.kernels.sampling import draw as draw_module
from draftsmith.kernels.verify import chain
from draftsmith.kernels.verify.chain import _kernel
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(_kernel() is None, reason="there is no C++ compiler")

PROMPTS = [[5, 60, 7, 200], [11, 12, 13], [9, 8, 7, 6, 5, 4]]
PARAMS = [
    SamplingParams(seed=seed, max_tokens=24, ignore_eos=True, **values)
    for seed, values in enumerate(
        ({"temperature": 1.0}, {"temperature": 0.7, "top_k": 30, "top_p": 0.9}, {"temperature": 0})
    )
]


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("qwen3"))


def texts(target: Target, family: str | None) -> list[list[int]]:
    drafter: Any = Ngram(min_n=1, max_n=3) if family == "ngram" else None
    if family == "eagle3":
        drafter = FAMILIES[family].create(OPTIONS[family](), target, seed=1).eval()
    engine = build_engine(target, drafter, EngineConfig(k=3, max_length=64))
    requests = [engine.submit(*given) for given in zip(PROMPTS, PARAMS, strict=True)]
    while engine.busy:
        engine.step()
    assert not engine.stats.fallbacks
    return [request.output for request in requests]


class Counted:
    """Calls of a function, and of those how many it decided."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self.calls, self.decided = function, 0, 0

    def __call__(self, *arguments: Any) -> Any:
        found = self.function(*arguments)
        self.calls += 1
        self.decided += found is not None
        return found


@pytest.mark.parametrize("family", ["eagle3", "ngram"])
def test_seeded_texts_are_those_without_the_kernels(
    family: str | None, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = Counted(chain.verify_logits_compiled)
    drawn = Counted(draw_module.draw_compiled)
    monkeypatch.setattr(chain, "verify_logits_compiled", verified)
    monkeypatch.setattr(draw_module, "draw_compiled", drawn)
    found = texts(target, family)
    assert verified.calls >= 8 and verified.decided >= 0.9 * verified.calls
    assert (drawn.decided > 0) == (family == "eagle3")
    monkeypatch.setattr(chain, "verify_logits_compiled", lambda *_: None)
    monkeypatch.setattr(draw_module, "draw_compiled", lambda *_: None)
    assert found == texts(target, family)
