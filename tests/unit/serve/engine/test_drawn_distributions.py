"""Verification gets, for every drafted token, the very distribution that the token was drawn from,
at the token's own position.

Exact, family by family: a q that is a few hundredths sharper than what was drawn from would take a
million samples to see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.drafters.autoregressive import draft_sampler
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.trees import candidates as tree_distributions
from draftsmith.kernels.sampling.draw import Drawn
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.random_streams import Purpose
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.proposal import RoundProposal
from draftsmith.serve.engine.round import RowSampling
from draftsmith.serve.engine.verify import Rule
from draftsmith.serve.sampling.params import SamplingParams

K = 3
# Lengths so unlike that a position says whose it is.
PROMPTS = [[5, 60, 7, 200, 9, 33], [11 + place % 200 for place in range(80)]]
PARAMS = [
    SamplingParams(temperature=0.8, top_k=20, max_tokens=9, ignore_eos=True, seed=1),
    SamplingParams(
        temperature=1.3, top_p=0.9, max_tokens=9, ignore_eos=True, seed=2, presence_penalty=0.5
    ),
]
CHAINS = [name for name in OPTIONS if name in FAMILIES and name != "suffix"]
TREES = ["eagle3", "eagle1", "mtp"]


class Watch:
    """What was drawn from, by position, and what verification was given."""

    def __init__(self) -> None:
        self.drawn: dict[int, list[torch.Tensor]] = {}
        self.num_compared = 0
        self.depths: set[int] = set()

    def sampler(self, usual: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def watched(
            distribution: torch.Tensor,
            seeds: torch.Tensor,
            positions: torch.Tensor,
            purpose: Purpose,
            *more: int,
        ) -> Any:
            assert purpose is Purpose.DRAFT
            for position, row in zip(positions.tolist(), distribution.clone(), strict=True):
                self.drawn.setdefault(position, []).append(row)
            return usual(distribution, seeds, positions, purpose, *more)

        return watched

    def drawer(self, usual: Callable[..., Drawn]) -> Callable[..., Drawn]:
        def watched(
            logits: torch.Tensor,
            rows: SamplingRows,
            seeds: torch.Tensor,
            positions: torch.Tensor,
            purpose: Purpose,
        ) -> Drawn:
            assert purpose is Purpose.DRAFT
            drawn = usual(logits, rows, seeds, positions, purpose)
            for position, row in zip(positions.tolist(), drawn.logits.clone(), strict=True):
                self.drawn.setdefault(position, []).append(row)
            return drawn

        return watched

    def rule(self, usual: Rule) -> Rule:
        def watched(
            logits: torch.Tensor, proposal: RoundProposal | None, sampling: RowSampling
        ) -> torch.Tensor:
            if proposal is not None:
                for row, position in enumerate(sampling.positions[: len(proposal.sizes)].tolist()):
                    self.row(proposal, row, position)
                self.drawn.clear()
            return usual(logits, proposal, sampling)

        return watched

    def row(self, proposal: RoundProposal, row: int, position: int) -> None:
        _, lengths, q_logits, _ = proposal.drafts
        length = int(lengths[row])
        assert q_logits is not None
        if proposal.nodes is None:
            for depth in range(length):
                self.compare(position + depth, depth, q_logits[row, depth])
            return
        parents, _, q_rows = proposal.nodes
        assert q_rows is not None
        depths: list[int] = []
        for parent in parents[row, :length].tolist():
            depths.append(0 if parent < 0 else depths[parent] + 1)
            q = q_logits[q_rows[row, parent + 1]]
            self.compare(position + depths[-1], depths[-1], q)

    def compare(self, position: int, depth: int, q: torch.Tensor) -> None:
        assert any(torch.equal(one, q) for one in self.drawn.get(position, ())), (
            f"depth {depth} was drawn from another q"
        )
        self.num_compared += 1
        self.depths.add(depth)


def run(target: Target, family: str, watch: Watch, **config: Any) -> None:
    drafter = FAMILIES[family].create(OPTIONS[family](), target, seed=1).eval()
    engine = build_engine(target, drafter, EngineConfig(**config, compile="off"))
    engine.rule = watch.rule(engine.rule)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.submit(prompt, params)
    while engine.busy:
        engine.step()
    assert not engine.stats.fallbacks


@pytest.mark.parametrize(
    "family, verification", [*((family, "chain") for family in CHAINS), ("medusa", "block")]
)
def test_chains_are_judged_by_what_they_were_drawn_from(
    family: str, verification: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    monkeypatch.setattr(draft_sampler, "draw", watch.drawer(draft_sampler.draw))
    run(target, family, watch, k=K, verification=verification)
    assert watch.depths == set(range(K)) and watch.num_compared > 10


@pytest.mark.parametrize("family", TREES)
def test_trees_are_judged_by_what_they_were_drawn_from(
    family: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    monkeypatch.setattr(
        tree_distributions, "draw_several", watch.sampler(tree_distributions.draw_several)
    )
    run(target, family, watch, tree="sampled:2x1x1")
    assert watch.depths == set(range(3)) and watch.num_compared > 10


def test_a_q_that_is_a_little_sharper_is_seen(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    monkeypatch.setattr(draft_sampler, "draw", watch.drawer(draft_sampler.draw))

    class Sharper(Watch):
        def compare(self, position: int, depth: int, q: torch.Tensor) -> None:
            watch.compare(position, depth, q * 1.02)

    with pytest.raises(AssertionError, match="another q"):
        run(target, "medusa", Sharper(), k=K)
