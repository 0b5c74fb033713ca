"""No choice is made by a draw that will be made again: whatever looks at rejected drafts between
two rounds keeps the target's distribution. With noise keyed by position alone, as a control, the
same tests see each bias.

The target draws every token from `P`, whatever came before it, and every test plants the worst that
its mechanism's interface allows: the draft that the next round would repeat is looked at, and by
what it is that round is drafted or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.drafters.autoregressive.draft_sampler import DraftSampler
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.statistics import Fit, chi_square_survival
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import Control, RoundPlan, RoundResult, RowBudget
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.round import RowSampling
from draftsmith.serve.sampling.params import SamplingParams
from tests.stand_in_drafts import Uncached

FALSE_ALARM, CAUGHT = 1e-9, 1e-6
A, B, C, D = range(4)
IMPOSSIBLE = -200.0
P = (0.5, 0.5, 0.0, 0.0)
PROMPT = [D, D, D]  # the first token, which is decided without drafts, stands at position 3
K = 4
# more tokens than are looked at are asked for: near its end an answer is drafted less deep
SPARE = 2 * K


def save_target(folder: Path, probs: Sequence[float]) -> str:
    """A model whose logits are those of `probs` behind every text."""
    size = 16
    config = LlamaConfig(
        vocab_size=len(probs), hidden_size=size, intermediate_size=size, num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=2048, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        model.lm_head.weight[:, 0] = logits_of(probs)
    model.save_pretrained(folder)
    return str(folder)


def logits_of(probs: Sequence[float]) -> torch.Tensor:
    return torch.tensor(probs).log().clamp(min=IMPOSSIBLE)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(save_target(tmp_path_factory.mktemp("target"), P))


@pytest.fixture
def keyed_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: every round drafts with the request's own noise, a position's being the same in
    all of them."""
    monkeypatch.setattr(RowSampling, "draft_seeds", property(lambda self: self.seeds))


class Planted(Uncached):
    """Drafts by the phase of a round, the position of its first drafted token modulo the number of
    phases.

    Phase 0 offers a token that is never kept and then one of `P`, which is what the next round
    would draft first; phase 1 offers one token of `P`, and what comes after it must not be kept.
    `sizes` are the tokens offered in each phase.
    """

    sizes = (2, 1, 0)

    def propose(self, inputs: DraftInputs) -> Proposal:
        positions = inputs.starts + inputs.lengths
        phases = positions % len(self.sizes)
        sampler = DraftSampler(inputs, vocab_size=len(P))
        _, depths = sampler.plan(range(len(phases))).sent(positions.device)
        for depth, (rows, _, _) in enumerate(depths):
            likely = (phases[rows] == 0) & (depth > 0) | (phases[rows] == 1) & (depth == 0)
            logits = torch.where(likely[:, None], logits_of(P), logits_of((0, 0, 1, 0)))
            logits = self.damaged(logits, phases[rows], sampler.tokens[rows, :depth])
            sampler.draw(rows, depth, logits, positions[rows] + depth)
        sampler.shorten(self.lengths(phases, sampler.tokens))
        return sampler.proposal()

    def damaged(
        self, logits: torch.Tensor, phases: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """The logits [R, V] that follow `tokens` [R, depth]."""
        return logits

    def lengths(self, phases: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.sizes)[phases]


class Damaged(Planted):
    """Has no distribution behind `A` in phase 0, which the failure before makes the second one in a
    row: the draft rests in the round of phase 1. That failure, in the last phase, depends on
    nothing drawn; the phases between are sound."""

    sizes = (3, 1, 0, 1)
    failures = 0  # in a row, as the engine counts them

    def damaged(
        self, logits: torch.Tensor, phases: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        if tokens.shape[1] == 0:
            broken = (phases == len(self.sizes) - 1) & (self.failures == 0)
        else:
            broken = (
                (phases == 0) & (self.failures == 1) & (tokens.shape[1] == 2) & (tokens[:, -1] == A)
            )
        return torch.where(broken[:, None], torch.nan, logits)

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = super().propose(inputs)
        drawn = proposal.logits.gather(2, proposal.tokens.clamp(min=0)[..., None])[..., 0]
        self.failures = (
            self.failures + 1 if (drawn[proposal.tokens >= 0] == -torch.inf).any() else 0
        )
        return proposal


class Ending(Planted):
    """Ends behind `A` in phase 0, as a guess of survival may: before the third token is drawn."""

    def lengths(self, phases: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        longer = (phases == 0) & (tokens[:, min(1, tokens.shape[1] - 1)] != A)
        return torch.where(longer, K, super().lengths(phases, tokens))


class ByDrafted(Control):
    """Drafts in no round after one whose drafts, two at least, ended before `K`."""

    learns = True
    ended = False

    def choose(self, wishes: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        return RoundPlan([0 if self.ended else wish.most for wish in wishes])

    def observe(self, result: RoundResult) -> None:
        self.ended = 1 < sum(row.drafted or 0 for row in result.offers) < K


def answer(engine: EngineCore, length: int) -> torch.Tensor:
    """[1, length] of the tokens from the first drafted position, 4, on."""
    params = SamplingParams(max_tokens=1 + length + SPARE, ignore_eos=True)
    (completion,) = engine.generate([PROMPT], params, text=False)
    return torch.tensor([completion.tokens[1 : 1 + length]])


def fit(tokens: torch.Tensor, period: int, before: int) -> Fit:
    """Likelihood-ratio test that tokens [N, L] come from `P`, whatever their place modulo `period`
    and the `before` tokens before them are: each such context's counts are a sample of `P` of their
    own."""
    num_tokens = len(P)
    cells = torch.arange(before, tokens.shape[1]) % period
    for back in range(before, -1, -1):
        cells = cells * num_tokens + tokens[:, before - back : tokens.shape[1] - back]
    counts = (
        torch.bincount(cells.flatten(), minlength=period * num_tokens ** (before + 1))
        .view(-1, num_tokens)
        .double()
    )
    counts = counts[counts.sum(dim=1) > 0]
    expected = counts.sum(dim=1, keepdim=True) * torch.tensor(P, dtype=torch.float64)
    assert bool((counts[expected == 0] == 0).all()) and float(expected[expected > 0].min()) > 5
    statistic = 2 * float(torch.xlogy(counts, counts / expected).nan_to_num().sum())
    degrees = len(counts) * (sum(mass > 0 for mass in P) - 1)
    return Fit(statistic, degrees, chi_square_survival(statistic, degrees), tokens.numel())


class Mechanism(NamedTuple):
    """`make(target)` is an engine with the worst decision-maker; its bias shows in `period`
    places."""

    make: Callable[[Target], EngineCore]
    period: int
    length: int


def served(target: Target, drafter: object, **options: object) -> EngineCore:
    config = EngineConfig(k=K, max_batch=1, max_length=2048, seed=1, prefix_cache=False, **options)
    return build_engine(target, drafter, config)


def rest(target: Target) -> EngineCore:
    return served(target, Damaged())


def k_auto(target: Target) -> EngineCore:
    engine = served(target, Ending(), adaptive=True)
    engine.scheduler.control = ByDrafted()
    return engine


MECHANISMS = {"rest": Mechanism(rest, 4, 1000), "k auto": Mechanism(k_auto, 3, 900)}


@pytest.fixture(params=MECHANISMS)
def mechanism(request: pytest.FixtureRequest) -> Mechanism:
    return MECHANISMS[request.param]


def test_tokens_and_pairs_of_them_keep_the_targets_distribution(
    mechanism: Mechanism, target: Target
) -> None:
    engine = mechanism.make(target)
    tokens = answer(engine, mechanism.length)
    for period, before in {(1, 0), (1, 1), (mechanism.period, 0)}:
        assert (found := fit(tokens, period, before)).p_value > FALSE_ALARM, (period, before, found)
    assert engine.stats.num_draft_tokens > tokens.numel() / 2


@pytest.mark.long
def test_noise_keyed_by_position_is_caught(
    mechanism: Mechanism, target: Target, keyed_by_position: None
) -> None:
    tokens = answer(mechanism.make(target), mechanism.length)
    assert (found := fit(tokens, mechanism.period, 0)).p_value < CAUGHT, found
