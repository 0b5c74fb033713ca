"""Every drafted token has noise of its own: of its depth, and of its round.

Drafts are drawn at temperature 100, where every family's distributions are all but uniform over the
vocabulary: two tokens that are drawn independently are hardly ever equal, two drawn with the same
noise nearly always are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams

K = 4
PARAMS = SamplingParams(draft_temperature=100.0, max_tokens=14, ignore_eos=True)
PROMPTS = torch.randint(3, 288, (8, 6), generator=torch.Generator().manual_seed(0)).tolist()
WAYS = {"chain": {}, "block": {"verification": "block"}, "tree": {"tree": "sampled:1x1x1x1"}}


@dataclass
class Repeats:
    """How many drafted tokens are like the one of the depth before, or of the round before for the
    same position."""

    num_depths: int = 0
    same_depths: int = 0
    num_rounds: int = 0
    same_rounds: int = 0
    # by request and position, the last one drafted
    drafted: dict[tuple[str, int], int] = field(default_factory=dict)

    def watch(self, propose: Callable[..., Proposal]) -> Callable[..., Proposal]:
        def watched(inputs: DraftInputs, *shape: Any) -> Proposal:
            proposal = propose(inputs, *shape)
            rows = zip(
                inputs.request_ids,
                inputs.histories,
                proposal.tokens.tolist(),
                proposal.lengths.tolist(),
            )
            for name, history, tokens, length in rows:
                self.add(name, len(history), tokens[:length])
            return proposal

        return watched

    def add(self, name: str, position: int, tokens: list[int]) -> None:
        self.num_depths += max(0, len(tokens) - 1)
        self.same_depths += sum(first == second for first, second in pairwise(tokens))
        for place, token in enumerate(tokens, position):
            before = self.drafted.get((name, place))
            self.num_rounds += before is not None
            self.same_rounds += before == token
            self.drafted[name, place] = token


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("qwen3"))


def repeats(target: Target, family: str, way: str) -> Repeats:
    drafter, seen = FAMILIES[family].create(OPTIONS[family](), target, seed=1).eval(), Repeats()
    drafter.propose = seen.watch(drafter.propose)
    if way == "tree":
        drafter.propose_tree = seen.watch(drafter.propose_tree)
    engine = build_engine(target, drafter, EngineConfig(k=K, max_length=64, **WAYS[way]))
    engine.generate(PROMPTS, PARAMS, text=False)
    assert not engine.stats.fallbacks and seen.num_depths > 100 and seen.num_rounds > 50
    return seen


# eagle1 and mtp draft by EAGLE-3's loop; rules other than blocks draft as chains do.
# Blocks and heads apart draw by one sampler.
CASES = [(family, "chain") for family in ("eagle3", "p-eagle", "draft-lm", "medusa", "dspark")]
CASES += [("eagle3", "block"), ("eagle3", "tree")]
CASES += [pytest.param(family, "chain", marks=pytest.mark.long) for family in ("mlp", "dflash")]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_no_two_drafted_tokens_share_noise(family: str, way: str, target: Target) -> None:
    seen = repeats(target, family, way)
    assert seen.same_depths < 0.1 * seen.num_depths
    assert seen.same_rounds < 0.1 * seen.num_rounds
