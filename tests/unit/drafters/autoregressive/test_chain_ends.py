"""Chains that end where the draft's confidence falls: by what came before a token, never by the
token itself."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import EndsChains, Proposal, ServingDrafter
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import DraftLmOptions, Eagle3Options, PeagleOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from tests.first_rounds import first_round

K = 4
ROWS = 48
TEXT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module", params=["eagle3", "draft-lm"])
def drafter(request: pytest.FixtureRequest, target: Target) -> ServingDrafter:
    made = (
        Eagle3.create(Eagle3Options(), target, seed=1)
        if request.param == "eagle3"
        else DraftLm.create(DraftLmOptions(num_layers=1, hidden_size=32), target, seed=1)
    )
    with torch.no_grad():
        # Distributions that differ in how sharp they are.
        made.head_weight().mul_(4.0 if request.param == "eagle3" else 12.0)
    return made.eval()


@torch.no_grad()
def propose(
    drafter: ServingDrafter,
    target: Target,
    least_confidence: float,
    *,
    temperature: float = 1.0,
    ks: list[int] | None = None,
) -> Proposal:
    """ROWS rows over one text, each with a seed of its own."""
    inputs = first_round(
        drafter, target, [TEXT] * ROWS, ks or [K] * ROWS,
        sampling=SamplingRows.of([temperature] * ROWS), least_confidence=least_confidence,
    )  # fmt: skip
    return drafter.propose(inputs)


def expected(whole: Proposal, least: float) -> torch.Tensor:
    """[B] lengths: one token more than those whose product of largest probabilities is enough."""
    sure = whole.logits.softmax(dim=-1).amax(dim=-1).cumprod(dim=1) >= least
    return torch.minimum(whole.lengths, 1 + sure.long().cumprod(dim=1).sum(dim=1))


@pytest.mark.parametrize("ks", [None, [0, 1, 2, 3, 4, 4] * (ROWS // 6)], ids=["all", "ragged"])
def test_a_chain_ends_behind_the_first_token_that_makes_it_unlikely(
    ks: list[int] | None, drafter: ServingDrafter, target: Target
) -> None:
    whole = propose(drafter, target, 0.0, ks=ks)
    assert whole.lengths.tolist() == (ks or [K] * ROWS)
    reached = whole.lengths == K
    confidence = whole.logits.softmax(dim=-1).amax(dim=-1)[reached, : K - 1].prod(dim=1)
    least = 1.01 * float(confidence.median())  # where rounding decides nothing
    ended = propose(drafter, target, least, ks=ks)
    lengths = expected(whole, least)
    assert ended.lengths.tolist() == lengths.tolist()
    assert len(set(lengths.tolist())) > 1 and (lengths < whole.lengths).any()
    # The same tokens from the same distributions: only how many there are differs.
    for row, length in enumerate(lengths.tolist()):
        assert ended.tokens[row, :length].tolist() == whole.tokens[row, :length].tolist()
        torch.testing.assert_close(ended.logits[row, :length], whole.logits[row, :length])
    assert (ended.tokens[torch.arange(K) >= ended.lengths[:, None]] == -1).all()


def test_confidence_is_the_models_whatever_the_temperature(
    drafter: ServingDrafter, target: Target
) -> None:
    """A greedy draft's own distribution is one-hot and would always be sure."""
    least = 0.999
    assert propose(drafter, target, least, temperature=0.0).lengths.tolist() == [1] * ROWS
    assert propose(drafter, target, least, temperature=0.01).lengths.tolist() == [1] * ROWS


def test_greedy_text_stays(drafter: ServingDrafter, target: Target) -> None:
    config = EngineConfig(k=K, least_confidence=0.1, compile="off")
    engine = build_engine(target, drafter, config)
    prompts = [[5 + index, 60, 7, 200, 9, 33] for index in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    completions = engine.generate(prompts, params)
    assert [one.tokens for one in completions] == target.answer(
        prompts, max_new_tokens=40, ignore_eos=True
    )
    offered = [length for one in completions for length in one.speculation.offered[:-K]]
    assert len(set(offered)) > 1 and not engine.stats.fallbacks, offered


def test_a_distribution_without_mass_does_not_end_a_chain(target: Target) -> None:
    """It must be met, so that the draft rests."""
    drafter = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    with torch.no_grad():
        drafter.head_weight().fill_(torch.nan)
    assert propose(drafter, target, 0.5).lengths.tolist() == [K] * ROWS


def test_drafts_that_come_in_one_pass_are_refused(target: Target) -> None:
    drafter = FAMILIES["p-eagle"].create(PeagleOptions(), target, seed=1).eval()
    config = EngineConfig(k=2, least_confidence=0.1, compile="off")
    for refused in (drafter, Suffix(), TextFirst(drafter, Suffix()), None):
        with pytest.raises(UserError, match=r"least_confidence is 0\.1 with"):
            build_engine(target, refused, config)
    head = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    assert isinstance(TextFirst(head, Suffix()), EndsChains)
    build_engine(target, TextFirst(head, Suffix()), config)
