"""Sampled text has the target's distribution for every way to draft, to verify and to ask, with the
draft's weights swapped too; the same test rejects each planted mistake."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.quirks.kept_state import KeptState
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose, sample
from draftsmith.kernels.statistics import Fit, detectable_bias
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import Control, RoundPlan, RowBudget
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.round import Round
from draftsmith.serve.requests.request import Request, RequestOptions, Update
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.sampling.tables import TokenTables
from tests.integration.served import (
    PATTERN,
    TEXT,
    TRAINED,
    Around,
    Distribution,
    Swaps,
    enumerated,
    finish,
    fit,
    make_drafter,
    small,
)
from tests.misreport import misreporting
from tests.stand_in_drafts import NearHeads, NearTrees, near, unlike

CAPTURED = True
FALSE_ALARM = 1e-6
FEW_SAMPLES, NUM_SAMPLES = 768, 1536
# Such that a total variation of 0.05 would be seen, by the number of tokens looked at.
MANY_SAMPLES = {3: 14_336, 4: 22_000}
LONG = [pytest.mark.long, pytest.mark.timeout(1800)]
K = 2
# Asked for beyond what is looked at, so that drafts are as deep, and trees as large, to its end.
MORE = 16
CONFIG: dict[str, Any] = {
    "k": K, "max_batch": 128, "max_length": 64, "max_round_tokens": 2048, "max_queue": 99_999,
    "compile": "off",
}  # fmt: skip
DYNAMIC: dict[str, Any] = {"tree": "dynamic:nodes=15,depth=3,width=3", "max_batch": 64}
SAMPLED: dict[str, Any] = {"tree": "sampled:3x2x1", "max_batch": 64}
CHOICES: dict[str, Any] = {"tree": "choices:0,0.0,1,0.1,2,0.0.0,1.0,0.0.1", "max_batch": 64}
BLOCK: dict[str, Any] = {"verification": "block"}

FEW_TOKENS = (40, 41, 42, 43, 0)
# Every pair of these stands in the prompt, so that each text is one to copy from; and the answer
# crosses the 32nd place, where chunks of 16 tokens end.
COPIED = (7, 51, 180)
COPIED_PROMPT = [COPIED[place] for place in (0, 0, 1, 0, 2, 1, 1, 2, 2)] * 3 + [7, 7, 51]
# What requests ask for, and how many tokens of an answer are looked at.
ASKED: dict[str, tuple[SamplingParams, int]] = {
    "top-k": (SamplingParams(temperature=1.2, top_k=4, ignore_eos=True), 3),
    "top-k, longer": (SamplingParams(temperature=1.2, top_k=4, ignore_eos=True), 4),
    # Flat, so that drafts without training and copies of the text are accepted often.
    "few tokens": (SamplingParams(temperature=2.0, allowed_token_ids=COPIED, ignore_eos=True), 4),
    "penalties": (
        SamplingParams(
            top_p=0.9, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=1.2,
            allowed_token_ids=FEW_TOKENS[:-1],
        ), 4,
    ),
    "bans": (
        SamplingParams(
            temperature=1.3, min_p=0.02, allowed_token_ids=FEW_TOKENS, min_tokens=2,
            bad_words=((40, 41), (42, 42), (43, 40, 43)), logit_bias=((0, 4.0), (41, -1.0)),
        ), 4,
    ),
    "grammar": (
        SamplingParams(
            temperature=1.5, top_k=8, grammar=Grammar.regex(PATTERN), frequency_penalty=0.5
        ), 4,
    ),
}  # fmt: skip
ADJUSTED = ("penalties", "bans", "grammar")


class World(NamedTuple):
    target: Target
    prompt: list[int]
    params: SamplingParams
    distribution: Distribution

    @property
    def length(self) -> int:
        return max(map(len, self.distribution))


@pytest.fixture(scope="module")
def world_of(load: Callable[[str], Target]) -> Callable[..., World]:
    @functools.cache
    def get(asked: str = "top-k", arch: str = "qwen3") -> World:
        params, length = ASKED[asked]
        target = load("llama" if asked in ADJUSTED else arch)
        if asked == "few tokens":
            prompt = COPIED_PROMPT
        else:
            prompt = [40, 41, 42, 40] if asked in ADJUSTED else repetitive_prompt(target)
        distribution = enumerated(target, prompt, params, length)
        assert abs(sum(distribution.values()) - 1) < 1e-9 and len(distribution) > 5
        return World(target, prompt, params, distribution)

    return get


@pytest.fixture(scope="module")
def world(world_of: Callable[..., World]) -> World:
    return world_of()


def repetitive_prompt(target: Target) -> list[int]:
    """One whose likely next tokens occur in it, so that suffix decoding has something to offer."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        tokens = torch.randint(3, target.vocab_size, (30,), generator=generator)
        _, hidden = target.states(tokens[None], torch.ones(1, 30), ())
        likeliest = target.head(hidden[0, -1]).topk(4).indices
        if torch.isin(likeliest, tokens).sum() >= 2:
            return tokens.tolist()
    raise AssertionError("no prompt with likely repetitions was found")


class Sure(Control):
    """Every row's drafts end where the drafter does not think them likely enough."""

    def choose(self, wishes: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        return RoundPlan([wish.most for wish in wishes], least_survival=0.25)


def guessing(target: Target) -> ServingDrafter:
    """DSpark, whose guesses depend on the state and the token before."""
    drafter: Any = make_drafter("dspark", target)
    with torch.no_grad():
        for seed, spread, weight in (
            (2, 0.1, drafter.confidence_head.proj.weight),
            (3, 1.0, drafter.markov_head.markov_w1.weight),
        ):
            weight.normal_(0.0, spread, generator=torch.Generator().manual_seed(seed))
    return drafter


def sharp(target: Target) -> ServingDrafter:
    """Close to the target, with states that are more and less sure."""
    drafter: Any = near(target)
    with torch.no_grad():
        drafter.lm.model.model.norm.weight.mul_(1.5)
    return drafter


@torch.no_grad()
def middling(drafter: Any, world: World) -> float:
    """A confidence that the draft reaches behind some of the likely first tokens and not behind
    others."""
    firsts = sorted({answer[0] for answer in world.distribution})
    ids = torch.tensor([[*world.prompt, first] for first in firsts])
    best = drafter.lm.model(ids).logits[:, -1].softmax(dim=-1).amax(dim=-1).sort().values
    return float(best[len(best) // 2 - 1 : len(best) // 2 + 1].mean())


DRAFTS: dict[str, Callable[[Target], ServingDrafter]] = {
    "near": near, "sharp": sharp, "guessing": guessing,
    "near trees": NearTrees, "near heads": NearHeads,
    "nearer": functools.partial(near, noise=0.03),
}  # fmt: skip


class Way(NamedTuple):
    """A draft, how it drafts and is verified, what requests ask for, of which target; `swapped`
    names the family whose weights are others in every round."""

    draft: str
    mode: dict[str, Any] = {}  # noqa: RUF012
    asked: str = "top-k"
    arch: str = "qwen3"
    draft_temperature: float | None = None
    swapped: str = ""


# Families draw by one sampler (`test_drawn_distributions.py` holds each to it exactly): one of each
# kind of proposal, of verification and of parameters.
ORDINARY = {
    "near": Way("near"),
    "greedy drafts": Way("near", {"draft_sampling": "greedy"}),
    "ended by its own guesses": Way("guessing"),
    "ended where it is unsure": Way("sharp"),
    "states that cannot be rolled back": Way("suffix", asked="few tokens", arch="lfm2"),
    "trees of given choices": Way("near heads", CHOICES, "top-k, longer"),
    "penalties in blocks": Way("nearer", BLOCK | {"k": 3}, "penalties"),
    "swapped": Way("unlike eagle3", asked="few tokens", swapped="eagle3"),
}
# In the long lane: every family, some with their weights swapped too.
LATER = {
    "blocks": Way("near", BLOCK),
    "answers that cross the end of a chunk": Way("suffix", asked="few tokens", arch="llama4"),
    **{f"penalties, {mode['tree']}": Way("eagle3", mode, "penalties") for mode in (SAMPLED, DYNAMIC)},
    **{family: Way(family, asked="few tokens") for family in TEXT},
    **{family: Way(family) for family in TRAINED},
    "drafts at half the temperature": Way("near", draft_temperature=0.5),
    **{f"eagle3, {mode['tree']}": Way("eagle3", mode, "top-k, longer") for mode in (SAMPLED, DYNAMIC)},
    "bans": Way("nearer", {"k": 3}, "bans"),
    **{
        f"swapped {family}": Way(f"unlike {family}", asked="few tokens", swapped=family)
        for family in ("draft-lm", "medusa")
    },
}  # fmt: skip
# A chain, blocks of drafts that end by themselves, trees and a grammar, with so many answers that a
# small bias would be seen.
MANY = {
    "near": Way("near", {"compile": "auto"}),
    "blocks ended where it is unsure": Way("sharp", BLOCK),
    "near trees": Way("near trees", SAMPLED, "top-k, longer"),
    "grammar": Way("nearer", {"k": 3}, "grammar"),
}
# Drafts of which some end after one token and some do not.
ENDED = ("guessing", "sharp")


def engine_of(world: World, draft: str | ServingDrafter, **options: Any) -> EngineCore:
    if not isinstance(draft, str):
        drafter: ServingDrafter = draft
    elif draft.startswith("unlike "):
        family = draft.removeprefix("unlike ")
        drafter = unlike(world.target, 0, family, **small(family))
    else:
        drafter = (
            DRAFTS[draft](world.target) if draft in DRAFTS else make_drafter(draft, world.target)
        )
    if draft == "sharp":
        options["least_confidence"] = middling(drafter, world)
    engine = build_engine(world.target, drafter, EngineConfig(**(CONFIG | options)))
    if draft == "guessing":
        engine.scheduler.control = Sure()
    return engine


def answers(
    world: World,
    engine: EngineCore,
    num_samples: int,
    *,
    between: Callable[[], object] | None = None,
    **params: Any,
) -> Fit:
    """Of the first tokens of answers, which are then cancelled."""
    asked = replace(world.params, max_tokens=world.length + MORE, **params)

    def stop(request: Request, update: Update) -> None:
        if len(request.output) >= world.length:
            engine.cancel(request)

    options = [
        RequestOptions(text=False, request_class=name, tenant="all alike")
        for name in ("", "code", "prose")
    ]
    requests = [
        engine.submit(world.prompt, asked, stop, options=options[number % len(options)])
        for number in range(num_samples)
    ]
    finish(engine, between)
    return fit(world.distribution, [request.output for request in requests])


def check_way(way: Way, world: World, num_samples: int, root: Path) -> None:
    """The distribution, and that drafts of every depth were offered, some of them kept."""
    engine = engine_of(world, way.draft, **way.mode)
    many = num_samples == MANY_SAMPLES[world.length]
    swaps = Swaps(engine, way.swapped, root) if way.swapped else None
    found = answers(
        world, engine, num_samples, between=swaps, draft_temperature=way.draft_temperature
    )
    assert found.p_value > FALSE_ALARM, found
    seen = 0.05 if many else 0.15 if num_samples >= NUM_SAMPLES else 0.25
    assert detectable_bias(num_samples, found.degrees, FALSE_ALARM) < seen
    stats = engine.stats
    assert not stats.fallbacks
    if swaps is not None:
        assert stats.num_swaps > (80 if many else 20)
    if way.draft in ENDED:
        assert 0.1 * stats.offered[0] < stats.offered[1] < 0.9 * stats.offered[0], stats.offered
    else:
        levels = range(engine.max_draft_depth)
        assert min(stats.offered[level] for level in levels) > num_samples / 4, stats.offered
        if "near" in way.draft or world.params.allowed_token_ids:
            assert min(stats.accepted[level] for level in levels) > num_samples / 50, stats.accepted
        else:
            assert stats.accepted[0] > 0


@pytest.mark.parametrize(
    "way",
    [*ORDINARY.values(), *(pytest.param(way, marks=LONG) for way in LATER.values())],
    ids=[*ORDINARY, *LATER],
)
def test_the_joint_distribution_of_served_tokens_is_the_targets(
    way: Way, world_of: Callable[..., World], tmp_path: Path
) -> None:
    few = way.draft in ENDED or way.asked == "top-k, longer"
    count = FEW_SAMPLES if few else NUM_SAMPLES
    check_way(way, world_of(way.asked, way.arch), count, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", MANY.values(), ids=MANY)
def test_the_joint_distribution_of_many_served_tokens(
    way: Way, world_of: Callable[..., World], tmp_path: Path
) -> None:
    """With swaps four drafts share a batch, and the weights of all are others in every round."""
    world = world_of(way.asked, way.arch)
    check_way(way, world, MANY_SAMPLES[world.length], tmp_path)


class Looking(Around):
    """Withdraws drafts from the first on that is not the likeliest of its distribution, as a guess
    made after the draw would."""

    def __init__(self, drafter: ServingDrafter):
        super().__init__(drafter)
        del self.propose

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = self.drafter.propose(inputs)
        kept = self.kept(proposal).long().cumprod(dim=1).sum(dim=1).to(proposal.lengths)
        return replace(proposal, lengths=torch.minimum(proposal.lengths, kept))

    def kept(self, proposal: Proposal) -> torch.Tensor:
        chosen = proposal.logits.gather(-1, proposal.tokens.clamp(min=0)[..., None])[..., 0]
        return chosen == proposal.logits.amax(dim=-1)


class Withdrawing(Looking):
    """Withdraws a drafted token for its own probability, as a bound on it would."""

    def kept(self, proposal: Proposal) -> torch.Tensor:
        probs = proposal.logits.softmax(dim=-1)
        own = probs.gather(-1, proposal.tokens.clamp(min=0)[..., None])[..., 0]
        return own.cumprod(dim=1) >= 0.3


class Lying(Looking):
    """Draws its tokens from one distribution and hands verification another, as weights that are
    swapped within a round would."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = self.drafter.propose(inputs)
        return replace(
            proposal, logits=torch.where(proposal.logits > -torch.inf, -proposal.logits, -torch.inf)
        )


class Undecided:
    """Decides a round by its own outcome: one that keeps no drafted token is made again without
    drafts."""

    def __init__(self, engine: EngineCore):
        self.engine, self.verify = engine, engine._verify

    def __call__(self, round: Round) -> None:
        self.verify(round)
        drafting = round.schedule.drafting
        for index, (row, emitted) in enumerate(zip(drafting, round.emitted)):
            if len(emitted) > 1 or round.proposal is None:
                continue
            begin = sum(size + 1 for size in round.sizes[:index])
            rows = SamplingRows.of([1.2], top_k=[4])
            position = torch.tensor([row.request.num_tokens])
            seed = torch.tensor([row.request.seed])
            logits = process(round.output.logits[begin : begin + 1], rows)
            emitted[0] = int(sample(logits, seed, position, Purpose.BONUS))


def undecided(world: World) -> EngineCore:
    engine = engine_of(world, "near", seed=1)
    engine._verify = Undecided(engine)
    return engine


Patch = pytest.MonkeyPatch


def always_ahead(patch: Patch) -> None:
    """States that rejected tokens were read into."""

    def verified(state: KeptState, left: int, drafted: int, accepted: int) -> None:
        state.side = 1 - state.side if drafted else state.side

    patch.setattr(KeptState, "verified", verified)


def unpenalised(patch: Patch) -> None:
    patch.setattr(TokenTables, "apply", lambda self, *given: None)


class Mistake(NamedTuple):
    """What is planted, in an engine of `way` or one that `make` makes."""

    way: Way = Way("near")
    make: Callable[[World], EngineCore] | None = None
    plant: Callable[[Patch], None] | None = None
    num_samples: int = NUM_SAMPLES


# Far fewer answers than are looked at above reject most of them.
MISTAKES = {
    "a wrong q": Mistake(make=lambda world: engine_of(world, Lying(near(world.target))), num_samples=512),
    "a q too sharp from the second drafted token on": Mistake(
        make=lambda world: engine_of(world, misreporting(near(world.target), K, world.target.vocab_size))
    ),
    "a guess made after the draw": Mistake(make=lambda world: engine_of(world, Looking(near(world.target))), num_samples=512),
    "a stop that undoes the round it goes by": Mistake(make=undecided, num_samples=512),
    "a draft withdrawn for its own probability": Mistake(
        make=lambda world: engine_of(world, Withdrawing(sharp(world.target))), num_samples=FEW_SAMPLES
    ),
    "a state that rejected tokens were read into": Mistake(Way("suffix", asked="few tokens", arch="lfm2"), plant=always_ahead, num_samples=384),
    "trees of a wrong q": Mistake(
        Way("", asked="top-k, longer"), lambda world: engine_of(world, NearTrees(world.target, lie=True), **SAMPLED),
        num_samples=512,
    ),
    "given choices told as draws": Mistake(
        Way("", asked="top-k, longer"), lambda world: engine_of(world, NearHeads(world.target, lie=True), **CHOICES),
        num_samples=512,
    ),
    "a penalty left out": Mistake(Way("nearer", {"k": 3}, "penalties"), plant=unpenalised, num_samples=256),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_rejected(
    mistake: Mistake, world_of: Callable[..., World], monkeypatch: Patch
) -> None:
    way = mistake.way
    world = world_of(way.asked, way.arch)
    if mistake.plant is not None:
        mistake.plant(monkeypatch)
    engine = mistake.make(world) if mistake.make else engine_of(world, way.draft, **way.mode)
    found = answers(world, engine, mistake.num_samples)
    assert found.p_value < FALSE_ALARM, found
