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
from draftsmith.drafters.blocks.dspark import Dspark
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import DsparkOptions, Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import SuffixDraft
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.drafters.tree_shape import TreeShape
from draftsmith.kernels.statistics import Fit, chi_square_survival
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import FixedControl, RoundPlan, RoundResult, RowBudget
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.round import RowSampling
from draftsmith.serve.requests.request import RequestOptions
from draftsmith.serve.sampling.params import SamplingParams
from tests.stand_in_drafts import Uncached

FALSE_ALARM, CAUGHT = 1e-9, 1e-6
A, B, C, D = range(4)
IMPOSSIBLE = -200.0
MASKED = 1  # the column of a state that tells tokens from `C`, which stands for those to be drafted
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
        model.model.embed_tokens.weight[C, MASKED] = -1.0
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

    def __init__(self) -> None:
        # the second token of each request's last round of phase 0
        self.discarded: dict[str, int] = {}

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
        for name, phase, tokens in zip(
            inputs.request_ids, phases.tolist(), sampler.tokens.tolist()
        ):
            if phase == 0 and len(tokens) > 1:
                self.discarded[name] = tokens[1]
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


class ByDrafted(FixedControl):
    """Drafts in no round after one whose drafts, two at least, ended before `K`."""

    learns = True
    ended = False

    def choose(self, wishes: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        return RoundPlan([0 if self.ended else wish.most for wish in wishes])

    def observe(self, result: RoundResult) -> None:
        self.ended = 1 < result.num_drafted < K


class Peeking:
    """Text that takes the rounds whose model drew `A` for the same position before; in front of
    `model`."""

    def __init__(self, model: Planted):
        self.model = model

    def drafts(self, inputs: DraftInputs) -> list[SuffixDraft]:
        drafts = []
        for name, history in zip(inputs.request_ids, inputs.histories):
            taken = len(history) % 3 == 1 and self.model.discarded.get(name) == A
            drafts.append(SuffixDraft([B], 9.0) if taken else SuffixDraft([], 0.0))
        return drafts

    def finished(self, request_id: str, tokens: list[int]) -> None:
        return


class BySurvival(ByDrafted):
    """The same by way of the least survival, which DSpark's guesses never reach when it is 0.9."""

    def choose(self, wishes: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        least = 0.9 if self.ended else 6e-4
        return RoundPlan([wish.most for wish in wishes], least_survival=least)


class Watched:
    """Grows the trees of `drafter` and keeps, of each request's last one, the first node below the
    first one."""

    def __init__(self, drafter: Eagle3):
        self.drafter = drafter
        self.family, self.taps, self.new_pool = drafter.family, drafter.taps, drafter.new_pool
        self.cached_after, self.propose = drafter.cached_after, drafter.propose
        self.below: dict[str, int] = {}

    def propose_tree(self, inputs: DraftInputs, shape: TreeShape) -> Proposal:
        proposal = self.drafter.propose_tree(inputs, shape)
        nodes = (proposal.parents == 0).long().argmax(dim=1)
        tokens = proposal.tokens.gather(1, nodes[:, None])[:, 0].tolist()
        self.below |= dict(zip(inputs.request_ids, tokens, strict=True))
        return proposal


class ByTree(FixedControl):
    """Grows no tree for a request whose last one had `A` where the next would begin; `engine` knows
    whose class is whose."""

    def __init__(self, engine: EngineCore, drafter: Watched):
        self.engine, self.drafter = engine, drafter

    def choose(self, wishes: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        names = {
            request.options.request_class: request.id for request in self.engine.scheduler.running
        }
        seen = [self.drafter.below.pop(names[wish.request_class], None) for wish in wishes]
        return RoundPlan(
            [0 if token == A else wish.most for wish, token in zip(wishes, seen, strict=True)]
        )


def ending_dspark(target: Target) -> Dspark:
    """Drafts `C`, which is never kept, behind `B` and from `P` behind all else. Guesses that
    nothing is kept behind an `A` that it has drafted itself."""
    drafter = Dspark.create(
        DsparkOptions(block_size=K, num_layers=1, markov_rank=len(P), taps=(1,), mask_token=C),
        target,
        seed=0,
    )
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight.copy_(torch.eye(len(P)))
        drafter.markov_head.markov_w2.weight.zero_()[C, B] = -2 * IMPOSSIBLE
        # Logits of a guess: behind the newest token 2, or -5 where that is A; behind drafted ones
        # 0, or -7 where that is A.
        drafter.confidence_head.proj.bias.fill_(1.0)
        drafter.confidence_head.proj.weight[0, MASKED] = 1.0
        drafter.confidence_head.proj.weight[0, target.hidden_size + A] = -7.0
    return drafter.eval()


def uniform_eagle3(target: Target) -> Eagle3:
    drafter = Eagle3.create(Eagle3Options(taps=(1, 2)), target, seed=0)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.zero_()
    return drafter.eval()


def answers(engine: EngineCore, count: int, length: int) -> torch.Tensor:
    """[count, length] of the tokens from the first drafted position, 4, on, each answer with a seed
    of its own."""
    params = SamplingParams(max_tokens=1 + length + SPARE, ignore_eos=True)
    requests = [
        engine.submit(PROMPT, params, options=RequestOptions(text=False, request_class=f"{number}"))
        for number in range(count)
    ]
    while engine.busy:
        engine.step()
    return torch.tensor([request.output[1 : 1 + length] for request in requests])


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
    """`make(target)` is an engine with the worst decision-maker; its bias shows in `period` places
    behind `before` tokens."""

    make: Callable[[Target], EngineCore]
    period: int
    before: int
    num_answers: int
    length: int


def served(target: Target, drafter: object, *, max_batch: int = 1, **options: object) -> EngineCore:
    config = EngineConfig(
        k=K, max_batch=max_batch, max_length=2048, seed=1, prefix_cache=False, **options
    )
    return build_engine(target, drafter, config)


def rest(target: Target) -> EngineCore:
    return served(target, Damaged())


def k_auto(target: Target) -> EngineCore:
    engine = served(target, Ending(), adaptive=True)
    engine.scheduler.control = ByDrafted()
    return engine


def dspark_ends(target: Target) -> EngineCore:
    engine = served(target, ending_dspark(target), adaptive=True)
    engine.scheduler.control = BySurvival()
    return engine


def text_first(target: Target) -> EngineCore:
    model = Planted()
    return served(target, TextFirst(model, Peeking(model)), max_batch=32)


def trees(target: Target) -> EngineCore:
    drafter = Watched(uniform_eagle3(target))
    engine = served(target, drafter, max_batch=64, tree="sampled:1x2", adaptive=True)
    engine.scheduler.control = ByTree(engine, drafter)
    return engine


MECHANISMS = {
    "rest": Mechanism(rest, 4, 0, 1, 1000),
    "k auto": Mechanism(k_auto, 3, 0, 1, 900),
    "DSpark's ends": Mechanism(dspark_ends, 1, 2, 1, 1000),
    "text first": Mechanism(text_first, 3, 0, 32, 60),
    "trees": Mechanism(trees, 1, 0, 64, 180),
}


@pytest.fixture(params=MECHANISMS)
def mechanism(request: pytest.FixtureRequest) -> Mechanism:
    return MECHANISMS[request.param]


def test_tokens_and_pairs_of_them_keep_the_targets_distribution(
    mechanism: Mechanism, target: Target
) -> None:
    engine = mechanism.make(target)
    tokens = answers(engine, mechanism.num_answers, mechanism.length)
    for period, before in {(1, 0), (1, 1), (mechanism.period, mechanism.before)}:
        assert (found := fit(tokens, period, before)).p_value > FALSE_ALARM, (period, before, found)
    assert engine.stats.num_draft_tokens > tokens.numel() / 2


@pytest.mark.long
def test_noise_keyed_by_position_is_caught(
    mechanism: Mechanism, target: Target, keyed_by_position: None
) -> None:
    tokens = answers(mechanism.make(target), mechanism.num_answers, mechanism.length)
    assert (found := fit(tokens, mechanism.period, mechanism.before)).p_value < CAUGHT, found
