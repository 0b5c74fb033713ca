"""A request that starts on cached blocks gives the same tokens, from the same proposals, as one
that computes everything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests.request import Request
from draftsmith.serve.sampling.params import SamplingParams
from tests.integration.served import Around, finish, make_drafter

SHARED = [20 + i * 7 % 90 for i in range(45)]
# The second goes on where the first's answer may not; the third leaves the shared text at a block's
# end, the fourth inside one.
PROMPTS = [SHARED, [*SHARED, 5, 6, 7], [*SHARED[:32], 99, 98], [*SHARED[:37], 4], SHARED]
FAMILIES = ("eagle3", "medusa", "dflash", "draft-lm")


def drafter_of(family: str, target: Target) -> ServingDrafter:
    options = {"init": target.name} if family == "draft-lm" else {}
    return make_drafter(family, target, **options)


class Witness(Around):
    """Keeps every proposal under the text it was made for."""

    def __init__(self, drafter: ServingDrafter):
        super().__init__(drafter)
        del self.propose
        self.told: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.starts: list[int] = []

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = self.drafter.propose(inputs)
        self.starts += inputs.starts.tolist()
        for row, history in enumerate(inputs.histories):
            length, seed = int(proposal.lengths[row]), int(inputs.seeds[row])
            self.told[(seed, *history)] = (
                proposal.tokens[row, :length],
                proposal.logits[row, :length].softmax(-1),
            )
        return proposal


def params(index: int, k: int | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, top_k=20, seed=7 + index, max_tokens=20, ignore_eos=True, k=k
    )


def serve(engine: EngineCore, *, quiet: bool) -> list[Request]:
    """All prompts one after another. `quiet`: the first is served without drafts, as under a load
    that does not pay for them."""
    requests = []
    for index, prompt in enumerate(PROMPTS):
        requests.append(engine.submit(prompt, params(index, k=0 if quiet and index == 0 else None)))
        finish(engine)
    return requests


def assert_same_proposals(one: Witness, other: Witness) -> None:
    assert one.told.keys() == other.told.keys() and len(one.told) > 10
    for text, (tokens, distribution) in one.told.items():
        assert tokens.tolist() == other.told[text][0].tolist()
        torch.testing.assert_close(distribution, other.told[text][1], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "quiet"),
    [
        *((family, False) for family in FAMILIES),
        ("eagle3", True),
        ("draft-lm", True),
        pytest.param("mtp", False, marks=pytest.mark.long),
    ],
)
def test_hits_change_neither_outputs_nor_proposals(
    family: str, quiet: bool, target: Target
) -> None:
    drafter = drafter_of(family, target)
    config = EngineConfig(k=3, block_size=8, max_round_tokens=20)
    cold, warm = Witness(drafter), Witness(drafter)
    without = serve(build_engine(target, cold, replace(config, prefix_cache=False)), quiet=quiet)
    engine = build_engine(target, warm, config)
    found = serve(engine, quiet=quiet)
    assert [request.output for request in found] == [request.output for request in without]
    assert_same_proposals(cold, warm)
    stats = engine.stats
    assert stats.prefix_cache_queries == sum(len(prompt) for prompt in PROMPTS)
    # A head shares no block whose next token differs, and nothing that only the target has read.
    expected = (
        40 + 32 + 32 + 40 if not drafter.taps else 40 + 24 + 32 + 40 if not quiet else 24 + 32 + 40
    )
    assert stats.prefix_cache_hits == expected
    # The draft, too, started on what was there.
    assert quiet or sum(start == 0 for start in warm.starts) == 1
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_usable


def test_taps_of_undrafted_text_are_found_again(target: Target) -> None:
    """Drafting pauses while the first request runs; the second drafts from taps that its cached
    blocks carry."""
    drafter = drafter_of("eagle3", target)
    cold, warm = Witness(drafter), Witness(drafter)
    engine = build_engine(target, warm, EngineConfig(k=3, block_size=8))
    engine.draft._pause = 10_000
    engine.generate([SHARED], params(0))
    engine.draft._pause = 0
    found = engine.generate([PROMPTS[1]], params(1))
    assert engine.stats.prefix_cache_hits == 40 and warm.starts[0] == 0
    alone = build_engine(target, cold, EngineConfig(k=3, prefix_cache=False)).generate(
        [PROMPTS[1]], params(1)
    )
    assert found[0].tokens == alone[0].tokens
    assert_same_proposals(cold, warm)


def test_the_cache_can_be_switched_off(target: Target) -> None:
    engine = build_engine(target, None, EngineConfig(prefix_cache=False))
    engine.generate([SHARED, SHARED], params(0))
    assert engine.stats.prefix_cache_queries == engine.stats.prefix_cache_hits == 0
