"""Sampled output over HTTP has the target's distribution, whichever drafter; the same test rejects
a drafter that lies about q."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.heads.mtp import Mtp
from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import (
    OPTIONS,
    DraftLmOptions,
    Eagle3Options,
    MtpOptions,
    SuffixOptions,
)
from draftsmith.drafters.recurrent.kept import KeptState
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose, sample
from draftsmith.kernels.statistics import Fit, chi_square, detectable_bias
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control import stopping
from draftsmith.serve.control.control import FixedControl, RoundPlan, RowBudget
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.engine.round import Round
from draftsmith.serve.sampling.params import SamplingParams

HEADS = ["p-eagle", "eagle1", "medusa", "mlp", "dflash", "dspark"]
DRAFTERS = ["ngram", "suffix", "eagle3", "mtp", "draft-lm", "suffix and draft-lm", *HEADS]
FALSE_ALARM = 1e-6
NUM_SAMPLES, MANY_SAMPLES = 1536, 14_336
LONG = [pytest.mark.long, pytest.mark.timeout(900)]
SIZES = [NUM_SAMPLES, pytest.param(MANY_SAMPLES, marks=LONG)]
LENGTH, K = 3, 2  # tokens looked at, and drafted in a round
ASKED = LENGTH + K  # the last tokens of an answer are drafted less deep
SAMPLING = {"temperature": 1.2, "top_k": 4}


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("qwen3"))


def make(family: str, target: Target) -> ServingDrafter:
    if family == "ngram":
        return Ngram(min_n=1, max_n=3)
    if family == "suffix":
        return Suffix(SuffixOptions(max_spec_offset=1.0))
    if family == "eagle3":
        return Eagle3.create(Eagle3Options(), target, seed=1).eval()
    if family == "mtp":
        return Mtp.create(MtpOptions(), target, seed=1).eval()
    if family == "suffix and draft-lm":
        return TextFirst(
            make("draft-lm", target), Suffix(SuffixOptions(max_spec_offset=1.0)), share=0.3
        )
    if family in HEADS:
        return FAMILIES[family].create(OPTIONS[family](), target, seed=1).eval()
    # Close to the target, so that many drafts are kept: its weights with some noise.
    drafter = DraftLm.create(DraftLmOptions(init=target.name), target, seed=1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(
                0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    return drafter.eval()


class Sure(FixedControl):
    """Every row's drafts end where the drafter does not think them likely enough."""

    def choose(self, wishes: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        return RoundPlan([wish.most for wish in wishes], least_survival=0.25)


class Looking:
    """Withdraws drafts from the first on that is not the likeliest of its distribution, as a guess
    made after the draw would."""

    def __init__(self, drafter: ServingDrafter):
        self.drafter = drafter
        self.family, self.taps, self.new_pool = drafter.family, drafter.taps, drafter.new_pool
        self.cached_after = drafter.cached_after

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = self.drafter.propose(inputs)
        real = proposal.tokens.clamp(min=0)[..., None]
        chosen = proposal.logits.gather(-1, real)[..., 0]
        likely = (chosen == proposal.logits.amax(dim=-1)).long().cumprod(dim=1).sum(dim=1)
        return replace(
            proposal, lengths=torch.minimum(proposal.lengths, likely.to(proposal.lengths))
        )


class Lying:
    """Draws its tokens from one distribution and hands verification another."""

    def __init__(self, drafter: ServingDrafter):
        self.drafter = drafter
        self.family, self.taps, self.new_pool = drafter.family, drafter.taps, drafter.new_pool
        self.cached_after = drafter.cached_after

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = self.drafter.propose(inputs)
        return replace(
            proposal, logits=torch.where(proposal.logits > -torch.inf, -proposal.logits, -torch.inf)
        )


@pytest.fixture(scope="module")
def prompt(target: Target) -> list[int]:
    return repetitive_prompt(target)


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


@pytest.fixture(scope="module")
def distribution(target: Target, prompt: list[int]) -> dict[tuple[int, ...], float]:
    return enumerated(target, prompt)


def enumerated(target: Target, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Every answer of LENGTH tokens with its probability, by enumeration under the target."""
    rows = SamplingRows.of([SAMPLING["temperature"]], top_k=[SAMPLING["top_k"]])
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, mass in distribution.items():
            tokens = torch.tensor([prompt + list(text)])
            _, hidden = target.states(tokens, torch.ones_like(tokens), ())
            probs = torch.softmax(process(target.head(hidden[0, -1:]).float(), rows).double(), -1)[
                0
            ]
            longer |= {
                (*text, token): mass * float(probs[token])
                for token in probs.nonzero()[:, 0].tolist()
            }
        distribution = longer
    return distribution


def fit(
    server: Any,
    prompt: list[int],
    distribution: dict[tuple[int, ...], float],
    *,
    num_samples: int = NUM_SAMPLES,
    seeded: bool = True,
) -> Fit:
    texts = {text: index for index, text in enumerate(distribution)}
    counts = torch.zeros(len(distribution) + 1)
    for start in range(0, num_samples, 128):
        body = server.complete(
            prompt,
            n=128,
            max_tokens=ASKED,
            ignore_eos=True,
            return_token_ids=True,
            **({"seed": 1000 * start} if seeded else {}),
            **SAMPLING,
        ).json()
        for choice in body["choices"]:
            counts[texts.get(tuple(choice["token_ids"][:LENGTH]), len(distribution))] += 1
    return chi_square(counts, torch.tensor([*distribution.values(), 0.0], dtype=torch.float64))


def bias_of(num_samples: int) -> float:
    """Largest bias that so many samples may leave unseen."""
    return 0.05 if num_samples >= MANY_SAMPLES else 0.25


def start(live_server: Callable, target: Target, drafter: ServingDrafter, **config: Any) -> Any:
    return live_server(
        target,
        drafter,
        EngineConfig(k=K, max_batch=128, max_length=64, max_round_tokens=4096, **config),
    )


@pytest.mark.parametrize("family", DRAFTERS)
def test_the_joint_distribution_of_served_tokens_is_the_targets(
    family: str,
    target: Target,
    prompt: list[int],
    distribution: dict[tuple[int, ...], float],
    live_server: Callable,
) -> None:
    server = start(live_server, target, make(family, target))
    found = fit(server, prompt, distribution)
    assert found.p_value > FALSE_ALARM, found
    assert detectable_bias(NUM_SAMPLES, found.degrees, FALSE_ALARM) < 0.15
    stats = server.engine.stats
    assert (
        min(stats.offered[depth] for depth in range(K)) > NUM_SAMPLES / 4 and not stats.fallbacks
    ), stats.offered


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", DRAFTERS)
def test_the_joint_distribution_of_many_served_tokens(
    family: str,
    target: Target,
    prompt: list[int],
    distribution: dict[tuple[int, ...], float],
    live_server: Callable,
) -> None:
    found = fit(
        start(live_server, target, make(family, target)),
        prompt,
        distribution,
        num_samples=MANY_SAMPLES,
    )
    assert found.p_value > FALSE_ALARM, found
    assert detectable_bias(MANY_SAMPLES, found.degrees, FALSE_ALARM) < 0.05


def test_a_wrong_q_is_rejected(
    target: Target,
    prompt: list[int],
    distribution: dict[tuple[int, ...], float],
    live_server: Callable,
) -> None:
    found = fit(start(live_server, target, Lying(make("draft-lm", target))), prompt, distribution)
    assert found.p_value < FALSE_ALARM, found


def test_a_q_too_sharp_from_the_second_drafted_token_on_is_rejected(
    target: Target,
    prompt: list[int],
    distribution: dict[tuple[int, ...], float],
    live_server: Callable,
) -> None:
    found = fit(
        start(live_server, target, make("draft-lm", target), test_misreport=f"{K}:3"),
        prompt,
        distribution,
    )
    assert found.p_value < FALSE_ALARM, found


@pytest.mark.parametrize("num_samples", SIZES)
def test_rounds_ended_by_the_drafters_own_guesses_keep_the_distribution(
    num_samples: int,
    target: Target,
    prompt: list[int],
    distribution: dict[tuple[int, ...], float],
    live_server: Callable,
) -> None:
    drafter = make("dspark", target)
    with torch.no_grad():
        # Guesses that depend on the state and the token before.
        drafter.confidence_head.proj.weight.normal_(
            0.0, 0.1, generator=torch.Generator().manual_seed(2)
        )
        drafter.markov_head.markov_w1.weight.normal_(
            0.0, 1.0, generator=torch.Generator().manual_seed(3)
        )
    server = start(live_server, target, drafter)
    server.engine.scheduler.control = Sure()
    found = fit(server, prompt, distribution, num_samples=num_samples)
    assert found.p_value > FALSE_ALARM, found
    assert detectable_bias(num_samples, found.degrees, FALSE_ALARM) < bias_of(num_samples)
    # Some rounds ended after one draft, some did not.
    offered = server.engine.stats.offered
    assert 0.1 * num_samples < offered[1] < 0.9 * offered[0], offered


def test_a_guess_made_after_the_draw_is_rejected(
    target: Target,
    prompt: list[int],
    distribution: dict[tuple[int, ...], float],
    live_server: Callable,
) -> None:
    found = fit(start(live_server, target, Looking(make("draft-lm", target))), prompt, distribution)
    assert found.p_value < FALSE_ALARM, found


@pytest.fixture
def quick_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting stops after one round without an accepted token and is tried again a token later."""
    for name in ("FEWEST", "SHORTEST", "LONGEST", "TRIAL"):
        monkeypatch.setattr(stopping, name, 1)


@pytest.mark.parametrize("num_samples", SIZES)
def test_drafting_that_a_request_stops_and_resumes_keeps_the_distribution(
    num_samples: int,
    target: Target,
    prompt: list[int],
    distribution: dict[tuple[int, ...], float],
    live_server: Callable,
    quick_to_stop: None,
) -> None:
    server = start(live_server, target, make("draft-lm", target), stop_below=0.5, seed=1)
    found = fit(server, prompt, distribution, num_samples=num_samples, seeded=False)
    assert found.p_value > FALSE_ALARM, found
    assert detectable_bias(num_samples, found.degrees, FALSE_ALARM) < bias_of(num_samples)
    assert server.engine.stats.num_drafting_stops > num_samples / 4


class Undecided:
    """Decides a round by its own outcome: one that keeps no drafted token is made again without
    drafts."""

    def __init__(self, engine: Engine):
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


def test_a_stop_that_undoes_the_round_it_goes_by_is_rejected(
    target: Target,
    prompt: list[int],
    distribution: dict[tuple[int, ...], float],
    live_server: Callable,
) -> None:
    server = start(live_server, target, make("draft-lm", target), seed=1)
    server.engine._verify = Undecided(server.engine)
    found = fit(server, prompt, distribution, num_samples=NUM_SAMPLES // 3, seeded=False)
    assert found.p_value < FALSE_ALARM, found


RECURRENT = ["lfm2", "nemotron_h"]
MORE_RECURRENT = [
    "qwen3_next",
    "jamba",
    "lfm2_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
    "granitemoehybrid",
    "falcon_h1",
    "bamba",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "recurrent_gemma",
    "kimi_linear",
    "zamba2",
    "minimax",
]


@pytest.mark.parametrize(
    "arch", [*RECURRENT, *(pytest.param(arch, marks=pytest.mark.long) for arch in MORE_RECURRENT)]
)
def test_states_that_cannot_be_rolled_back_keep_the_joint_distribution(
    arch: str, tiny_target: Callable[..., str]
) -> None:
    target = Target.load(tiny_target(arch))
    found = engine_fit(target, "ngram")
    assert found.p_value > FALSE_ALARM, found
    assert detectable_bias(NUM_SAMPLES, found.degrees, FALSE_ALARM) < 0.15


def test_answers_that_cross_the_end_of_a_chunk_keep_the_joint_distribution(
    tiny_target: Callable[..., str],
) -> None:
    """Chunks of 16 tokens behind a prompt of 30."""
    found = engine_fit(Target.load(tiny_target("llama4")), "ngram")
    assert found.p_value > FALSE_ALARM, found
    assert detectable_bias(NUM_SAMPLES, found.degrees, FALSE_ALARM) < 0.15


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", RECURRENT)
def test_many_tokens_of_states_that_cannot_be_rolled_back(
    arch: str, tiny_target: Callable[..., str]
) -> None:
    found = engine_fit(Target.load(tiny_target(arch)), "ngram", num_samples=MANY_SAMPLES)
    assert found.p_value > FALSE_ALARM, found
    assert detectable_bias(MANY_SAMPLES, found.degrees, FALSE_ALARM) < bias_of(MANY_SAMPLES)


@pytest.mark.parametrize("arch", RECURRENT[:1])
def test_a_state_that_rejected_tokens_were_read_into_is_rejected(
    arch: str, tiny_target: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def always_ahead(state: KeptState, left: int, drafted: int, accepted: int) -> None:
        state.side = 1 - state.side if drafted else state.side

    monkeypatch.setattr(KeptState, "verified", always_ahead)
    found = engine_fit(Target.load(tiny_target(arch)), "ngram", num_samples=NUM_SAMPLES // 2)
    assert found.p_value < FALSE_ALARM, found


def engine_fit(target: Target, family: str, *, num_samples: int = NUM_SAMPLES) -> Fit:
    """The answers of an engine by itself, which reads prompts in pieces."""
    prompt = repetitive_prompt(target)
    distribution = enumerated(target, prompt)
    config = EngineConfig(
        k=K, max_batch=128, max_length=64, max_round_tokens=1024, max_queue=MANY_SAMPLES
    )
    engine = build_engine(target, make(family, target), config)
    params = SamplingParams(**SAMPLING, max_tokens=ASKED, ignore_eos=True)
    counts = torch.zeros(len(distribution) + 1)
    texts = {text: index for index, text in enumerate(distribution)}
    for completion in engine.generate([prompt] * num_samples, params, text=False):
        counts[texts.get(tuple(completion.tokens[:LENGTH]), len(distribution))] += 1
    assert min(engine.stats.offered[depth] for depth in range(K)) > num_samples / 4
    assert not engine.stats.fallbacks
    return chi_square(counts, torch.tensor([*distribution.values(), 0.0], dtype=torch.float64))


class Withdrawing(Looking):
    """Withdraws a drafted token for its own probability, as a bound on it would."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = self.drafter.propose(inputs)
        own = proposal.logits.softmax(dim=-1).gather(-1, proposal.tokens.clamp(min=0)[..., None])
        sure = (own[..., 0].cumprod(dim=1) >= 0.3).long().cumprod(dim=1).sum(dim=1)
        return replace(proposal, lengths=torch.minimum(proposal.lengths, sure.to(proposal.lengths)))


def sharp_draft(target: Target) -> ServingDrafter:
    """As `make` makes it, with states that are more and less sure."""
    drafter = make("draft-lm", target)
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
    verification: str,
    num_samples: int,
    target: Target,
    prompt: list[int],
    distribution: dict[tuple[int, ...], float],
    live_server: Callable,
) -> None:
    options = {"least_confidence": 0.05, "verification": verification}
    server = start(live_server, target, sharp_draft(target), **options)
    found = fit(server, prompt, distribution, num_samples=num_samples)
    assert found.p_value > FALSE_ALARM, found
    assert detectable_bias(num_samples, found.degrees, FALSE_ALARM) < bias_of(num_samples)
    offered = server.engine.stats.offered
    assert 0.1 * offered[0] < offered[1] < 0.9 * offered[0], offered


def test_a_draft_withdrawn_for_its_own_probability_is_rejected(
    target: Target,
    prompt: list[int],
    distribution: dict[tuple[int, ...], float],
    live_server: Callable,
) -> None:
    server = start(live_server, target, Withdrawing(sharp_draft(target)))
    found = fit(server, prompt, distribution, num_samples=NUM_SAMPLES // 2)
    assert found.p_value < FALSE_ALARM, found
