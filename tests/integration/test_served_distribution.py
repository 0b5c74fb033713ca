"""Sampled text has the target's distribution for every way to draft and verify; the same test
rejects a drafter that lies about q and a choice that looks at what was drawn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.recurrent.kept import KeptState
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose, sample
from draftsmith.kernels.statistics import Fit, detectable_bias
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import FixedControl, RoundPlan, RowBudget
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.round import Round
from draftsmith.serve.sampling.params import SamplingParams
from tests.integration.served import (
    TEXT,
    TRAINED,
    Around,
    Distribution,
    enumerated,
    fit,
    make_drafter,
)
from tests.stand_in_drafts import near

FALSE_ALARM = 1e-6
NUM_SAMPLES, MANY_SAMPLES = 1536, 14_336
LONG = [pytest.mark.long, pytest.mark.timeout(900)]
LENGTH, K = 3, 2  # tokens looked at, and drafted in a round
ASKED = LENGTH + K  # the last tokens of an answer are drafted less deep
SAMPLING = {"temperature": 1.2, "top_k": 4}
CONFIG: dict[str, Any] = {
    "k": K, "max_batch": 128, "max_length": 64, "max_round_tokens": 1024, "max_queue": MANY_SAMPLES,
}  # fmt: skip


class Sure(FixedControl):
    """Every row's drafts end where the drafter does not think them likely enough."""

    def choose(self, wishes: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        return RoundPlan([wish.most for wish in wishes], least_survival=0.25)


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
    """Draws its tokens from one distribution and hands verification another."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = self.drafter.propose(inputs)
        return replace(
            proposal, logits=torch.where(proposal.logits > -torch.inf, -proposal.logits, -torch.inf)
        )


class World(NamedTuple):
    target: Target
    prompt: list[int]
    distribution: Distribution


@pytest.fixture(scope="module")
def world_of(load: Callable[[str], Target]) -> Callable[..., World]:
    @functools.cache
    def get(arch: str = "qwen3") -> World:
        target = load(arch)
        prompt = repetitive_prompt(target)
        return World(target, prompt, enumerated(target, prompt, LENGTH, **SAMPLING))

    return get


@pytest.fixture(scope="module")
def world(world_of: Callable[..., World]) -> World:
    return world_of()


def repetitive_prompt(target: Target) -> list[int]:
    """One whose likely next tokens occur in it, so that n-gram lookup has something to offer."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        tokens = torch.randint(3, target.vocab_size, (30,), generator=generator)
        _, hidden = target.states(tokens[None], torch.ones(1, 30), ())
        likeliest = target.head(hidden[0, -1]).topk(SAMPLING["top_k"]).indices
        if torch.isin(likeliest, tokens).sum() >= 2:
            return tokens.tolist()
    raise AssertionError("no prompt with likely repetitions was found")


def engine_of(world: World, drafter: ServingDrafter, **options: Any) -> EngineCore:
    return build_engine(world.target, drafter, EngineConfig(**(CONFIG | options)))


def answers(world: World, engine: EngineCore, num_samples: int, **params: Any) -> Fit:
    asked = SamplingParams(**SAMPLING, max_tokens=ASKED, ignore_eos=True, **params)
    found = engine.generate([world.prompt] * num_samples, asked, text=False)
    return fit(world.distribution, [one.tokens for one in found])


def check(world: World, engine: EngineCore, num_samples: int = NUM_SAMPLES, **params: Any) -> None:
    found = answers(world, engine, num_samples, **params)
    assert found.p_value > FALSE_ALARM, found
    seen = 0.05 if num_samples >= MANY_SAMPLES else 0.25 if num_samples < NUM_SAMPLES else 0.15
    assert detectable_bias(num_samples, found.degrees, FALSE_ALARM) < seen
    assert not engine.stats.fallbacks


def check_rejected(world: World, engine: EngineCore, num_samples: int = NUM_SAMPLES) -> None:
    found = answers(world, engine, num_samples)
    assert found.p_value < FALSE_ALARM, found


class Way(NamedTuple):
    family: str
    arch: str = "qwen3"
    config: dict[str, Any] = {}  # noqa: RUF012
    params: dict[str, Any] = {}  # noqa: RUF012


# Families draw by one sampler (`test_drawn_distributions.py` holds each to it exactly): one of each
# kind of proposal.
ORDINARY = {
    "ngram": Way("ngram"),
    "suffix and draft-lm": Way("suffix and draft-lm"),
    "eagle3": Way("eagle3"),
    "medusa": Way("medusa"),
    "dspark": Way("dspark"),
    "near": Way("near"),
    "blocks": Way("near", config={"verification": "block"}),
    "greedy drafts": Way("near", config={"draft_sampling": "greedy"}),
    "drafts at half the temperature": Way("near", params={"draft_temperature": 0.5}),
    "states that cannot be rolled back": Way("ngram", "lfm2"),
    "answers that cross the end of a chunk": Way("ngram", "llama4"),
}
# Drawn by what another case draws with.
SELDOM = [ORDINARY["suffix and draft-lm"], ORDINARY["drafts at half the temperature"]]
RECURRENT = [
    "nemotron_h", "qwen3_next", "jamba", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "granitemoehybrid",
    "falcon_h1", "bamba", "mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "kimi_linear", "zamba2", "minimax",
]  # fmt: skip
MANY = ORDINARY | {family: Way(family) for family in (*TEXT, *TRAINED)}


def drafter_of(way: Way, target: Target) -> ServingDrafter:
    return near(target) if way.family == "near" else make_drafter(way.family, target)


def check_way(world: World, way: Way, num_samples: int) -> None:
    engine = engine_of(world, drafter_of(way, world.target), **way.config)
    check(world, engine, num_samples, **way.params)
    offered = engine.stats.offered
    assert min(offered[depth] for depth in range(K)) > num_samples / 4, offered


@pytest.mark.parametrize(
    "way",
    [
        *(pytest.param(way, marks=LONG[0]) if way in SELDOM else way for way in ORDINARY.values()),
        *(pytest.param(Way("ngram", arch), marks=LONG[0]) for arch in RECURRENT),
        pytest.param(Way("near", "qwen3 int8"), marks=LONG[0]),
    ],
    ids=[*ORDINARY, *RECURRENT, "8 bits"],
)
def test_the_joint_distribution_of_served_tokens_is_the_targets(
    way: Way, world_of: Callable[..., World]
) -> None:
    check_way(world_of(way.arch), way, NUM_SAMPLES)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", MANY.values(), ids=MANY)
def test_the_joint_distribution_of_many_served_tokens(
    way: Way, world_of: Callable[..., World]
) -> None:
    check_way(world_of(way.arch), way, MANY_SAMPLES)


def test_the_joint_distribution_without_drafts(world: World) -> None:
    check(world, build_engine(world.target, None, EngineConfig(**(CONFIG | {"k": 0}))))


def test_the_joint_distribution_over_http(world: World, live_server: Callable) -> None:
    config = EngineConfig(**(CONFIG | {"max_round_tokens": 4096}))
    server = live_server(world.target, make_drafter("mtp", world.target), config)
    texts = []
    for seed in range(0, NUM_SAMPLES, 128):
        asked = {"n": 128, "max_tokens": ASKED, "ignore_eos": True, "return_token_ids": True}
        body = server.complete(world.prompt, **asked, **SAMPLING, seed=1000 * seed).json()
        texts += [choice["token_ids"] for choice in body["choices"]]
    found = fit(world.distribution, texts)
    assert found.p_value > FALSE_ALARM and not server.engine.stats.fallbacks, found


def test_a_wrong_q_is_rejected(world: World) -> None:
    check_rejected(world, engine_of(world, Lying(near(world.target))))


def test_a_q_too_sharp_from_the_second_drafted_token_on_is_rejected(world: World) -> None:
    check_rejected(world, engine_of(world, near(world.target), test_misreport=f"{K}:3"))


@pytest.mark.parametrize("num_samples", [NUM_SAMPLES, pytest.param(MANY_SAMPLES, marks=LONG)])
def test_rounds_ended_by_the_drafters_own_guesses_keep_the_distribution(
    num_samples: int, world: World
) -> None:
    drafter: Any = make_drafter("dspark", world.target)
    with torch.no_grad():
        # Guesses that depend on the state and the token before.
        for seed, spread, weight in (
            (2, 0.1, drafter.confidence_head.proj.weight),
            (3, 1.0, drafter.markov_head.markov_w1.weight),
        ):
            weight.normal_(0.0, spread, generator=torch.Generator().manual_seed(seed))
    engine = engine_of(world, drafter)
    engine.scheduler.control = Sure()
    check(world, engine, num_samples)
    # Some rounds ended after one draft, some did not.
    offered = engine.stats.offered
    assert 0.1 * num_samples < offered[1] < 0.9 * offered[0], offered


def test_a_guess_made_after_the_draw_is_rejected(world: World) -> None:
    check_rejected(world, engine_of(world, Looking(near(world.target))))


class Undecided:
    """Decides a round by its own outcome: one that keeps no drafted token is made again without
    drafts."""

    def __init__(self, engine: EngineCore):
        self.engine, self.verify = engine, engine._verify

    def __call__(self, round: Round) -> None:
        self.verify(round)
        drafting = round.schedule.drafting
        for index, (row, emitted) in enumerate(zip(drafting, round.verified.emitted)):
            if len(emitted) > 1 or round.proposal is None:
                continue
            begin = sum(len(chain) + 1 for chain in round.chains[:index])
            rows = SamplingRows.of([SAMPLING["temperature"]], top_k=[SAMPLING["top_k"]])
            position = torch.tensor([row.request.num_tokens])
            seed = torch.tensor([row.request.seed])
            logits = process(round.output.logits[begin : begin + 1], rows)
            emitted[0] = int(sample(logits, seed, position, Purpose.BONUS))


def test_a_stop_that_undoes_the_round_it_goes_by_is_rejected(world: World) -> None:
    engine = engine_of(world, near(world.target), seed=1)
    engine._verify = Undecided(engine)
    check_rejected(world, engine, NUM_SAMPLES // 3)


def test_a_state_that_rejected_tokens_were_read_into_is_rejected(
    world_of: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    def always_ahead(state: KeptState, left: int, drafted: int, accepted: int) -> None:
        state.side = 1 - state.side if drafted else state.side

    monkeypatch.setattr(KeptState, "verified", always_ahead)
    world = world_of("lfm2")
    check_rejected(world, engine_of(world, make_drafter("ngram", world.target)), NUM_SAMPLES // 2)


def sharp_draft(target: Target) -> ServingDrafter:
    """Close to the target, with states that are more and less sure."""
    drafter: Any = near(target)
    with torch.no_grad():
        drafter.lm.model.model.norm.weight.mul_(1.5)
    return drafter


@pytest.mark.parametrize(
    ("verification", "num_samples"),
    [
        ("chain", NUM_SAMPLES // 2),
        pytest.param("chain", MANY_SAMPLES, marks=LONG),
        pytest.param("block", MANY_SAMPLES, marks=LONG),
    ],
)
def test_chains_that_end_where_the_draft_is_unsure_keep_the_distribution(
    verification: str, num_samples: int, world: World
) -> None:
    options = {"least_confidence": 0.05, "verification": verification}
    engine = engine_of(world, sharp_draft(world.target), **options)
    check(world, engine, num_samples)
    offered = engine.stats.offered
    assert 0.1 * offered[0] < offered[1] < 0.9 * offered[0], offered


def test_a_draft_withdrawn_for_its_own_probability_is_rejected(world: World) -> None:
    engine = engine_of(world, Withdrawing(sharp_draft(world.target)))
    check_rejected(world, engine, NUM_SAMPLES // 2)


def test_typical_acceptance_has_another_distribution(world: World) -> None:
    options = {"verification": "typical", "draft_sampling": "greedy"}
    check_rejected(world, engine_of(world, near(world.target), **options))
