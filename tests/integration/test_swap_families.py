"""Swaps before every single round, for every trained family, of one draft or of four that share a
batch: greedy text is identical, the joint distribution of sampled text is kept.

Text drafters have no weights to swap: `test_swap.py` has their refusal; in front of a model they
are one of the families here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter, TrainedDrafter
from draftsmith.drafters.options import OPTIONS, SuffixOptions
from draftsmith.drafters.published.pool import DraftPool
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.kernels.statistics import Fit, detectable_bias
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.drafts import draft_set
from draftsmith.serve.engine import propose as drafting
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.proposal import Part, RoundProposal, joined
from draftsmith.serve.requests.request import CANARY, LIVE, RequestOptions, class_draft
from draftsmith.serve.sampling.params import SamplingParams
from tests.integration.served import Distribution, enumerated, fit
from tests.stand_in_drafts import unlike

PROMPTS = [[5, 60, 7, 200, 9, 33], [9, 8, 7], [100, 4, 100, 4, 100, 4, 77]]
FALSE_ALARM = 1e-6
NUM_SAMPLES, MANY_SAMPLES = 1024, 14_336
LENGTH, K = 4, 2  # tokens looked at, and drafted in a round
ASKED = LENGTH + K  # the last tokens of an answer are drafted less deep
# Few tokens and flat distributions, so that drafts without training are accepted often, and answers
# of several rounds are few.
ALLOWED = (7, 51, 180)
TEMPERATURE = 2.0
TEXT_FIRST = "suffix and draft-lm"
CLASSES = ("", "code", "prose")
FURTHER = (CANARY, class_draft("code"), class_draft("prose"))


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("qwen3"))


def new_draft(family: str, target: Target, seed: int) -> TrainedDrafter:
    options = {"num_layers": 1, "hidden_size": 32} if family == "draft-lm" else {}
    return unlike(target, seed, family, **options)


def served(family: str, target: Target) -> ServingDrafter:
    if family == TEXT_FIRST:
        return TextFirst(
            new_draft("draft-lm", target, 0), Suffix(SuffixOptions(max_spec_offset=1.0)), share=0.3
        )
    return new_draft(family, target, 0)


def saved(family: str, target: Target, root: Path) -> list[str]:
    family = "draft-lm" if family == TEXT_FIRST else family
    folders = [root / str(seed) for seed in (1, 2)]
    for seed, folder in enumerate(folders, 1):
        checkpoint.save(new_draft(family, target, seed), folder, target)
    return [str(folder) for folder in folders]


def add_drafts(engine: EngineCore, folders: list[str]) -> None:
    """A version on trial and the drafts of two classes beside the live one."""
    for number, name in enumerate(FURTHER):
        engine.drafts.prepare(folders[number % 2], "0", draft=name)
    engine.step()
    engine.drafts.router.canary_share = 0.5
    engine.drafts.router.pool = DraftPool({"code": "c01", "prose": "c02"})


def run(engine: EngineCore, folders: list[str]) -> int:
    """Until nobody is left, each round with other weights of every draft than the one before;
    returns the rounds."""
    rounds = 0
    while engine.scheduler.busy:
        for number, name in enumerate(engine.drafts.served):
            engine.drafts.prepare(folders[(rounds + number) % 2], str(rounds), draft=name)
        engine.step()
        rounds += 1
    return rounds


# A chain of states, blocks, heads apart, a model.
@pytest.mark.parametrize(
    "family",
    [
        "eagle3",
        "medusa",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("dspark", "draft-lm")),
    ],
)
def test_greedy_text_is_the_same_with_a_swap_before_every_round(
    family: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_set, "PROBES", 0.0)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = [
        one.tokens
        for one in build_engine(target, None, EngineConfig(compile="off")).generate(PROMPTS, params)
    ]
    drafter = new_draft(family, target, 0)
    addresses = {name: tensor.data_ptr() for name, tensor in drafter.state_dict().items()}
    engine = build_engine(target, drafter, EngineConfig(k=3, compile="off"))
    folders = saved(family, target, tmp_path)
    alone = [engine.submit(prompt, params) for prompt in PROMPTS]
    rounds = run(engine, folders)
    assert engine.stats.num_swaps == rounds > 5
    assert {name: tensor.data_ptr() for name, tensor in drafter.state_dict().items()} == addresses
    add_drafts(engine, folders)
    short = replace(params, max_tokens=10)
    together = [
        engine.submit(PROMPTS[0], short, options=RequestOptions(request_class=name))
        for name in CLASSES
    ]
    run(engine, folders)
    assert [request.output for request in alone] == expected
    assert [request.output for request in together] == [expected[0][:10]] * len(CLASSES)
    assert engine.stats.num_draft_tokens > 0 and not engine.stats.fallbacks
    assert all(engine.stats.routed[name] > 0 for name in FURTHER[1:])


@pytest.fixture(scope="module")
def distribution(target: Target) -> Distribution:
    return enumerated(target, PROMPTS[0], LENGTH, ALLOWED, temperature=TEMPERATURE)


def fit_swapped(
    engine: EngineCore,
    folders: list[str],
    distribution: Distribution,
    num_samples: int = NUM_SAMPLES,
) -> Fit:
    params = SamplingParams(
        max_tokens=ASKED, ignore_eos=True, temperature=TEMPERATURE, allowed_token_ids=ALLOWED
    )
    requests = [
        engine.submit(
            PROMPTS[0],
            replace(params, seed=seed),
            options=RequestOptions(
                text=False, request_class=CLASSES[seed % len(CLASSES)], tenant="all alike"
            ),
        )
        for seed in range(num_samples)
    ]
    run(engine, folders)
    return fit(distribution, [request.output for request in requests])


CONFIG = EngineConfig(
    k=K, max_batch=64, max_queue=MANY_SAMPLES, max_length=64, max_round_tokens=1024, compile="off"
)
# Each round swaps four drafts: the same samples in a quarter of the rounds.
WIDE = replace(CONFIG, max_batch=256, max_round_tokens=4096)


def check_drafted(engine: EngineCore, num_samples: int) -> None:
    """Every depth was drafted in rounds whose tokens are looked at."""
    stats = engine.stats
    assert min(stats.offered[depth] for depth in range(K)) > num_samples / 4, stats.offered
    assert stats.num_accepted_tokens > num_samples / 2 and not stats.fallbacks


# Of every family, with four drafts, in the long lane.
def test_the_joint_distribution_is_kept_with_a_swap_before_every_round(
    target: Target, distribution: Distribution, tmp_path: Path
) -> None:
    engine = build_engine(target, served("eagle3", target), CONFIG)
    found = fit_swapped(engine, saved("eagle3", target, tmp_path), distribution)
    assert found.p_value > FALSE_ALARM, found
    assert engine.stats.num_swaps > 20
    check_drafted(engine, NUM_SAMPLES)
    assert detectable_bias(NUM_SAMPLES, found.degrees, FALSE_ALARM) < 0.2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", (*OPTIONS, TEXT_FIRST))
def test_the_joint_distribution_is_kept_with_four_drafts_in_a_batch_and_all_swapped_before_every_round(
    family: str,
    target: Target,
    distribution: Distribution,
    tmp_path: Path,
) -> None:
    engine, folders = (
        build_engine(target, served(family, target), WIDE),
        saved(family, target, tmp_path),
    )
    add_drafts(engine, folders)
    found = fit_swapped(engine, folders, distribution, MANY_SAMPLES)
    assert found.p_value > FALSE_ALARM, found
    assert engine.stats.num_swaps > 80
    check_drafted(engine, MANY_SAMPLES)
    assert min(engine.stats.routed[name] for name in (LIVE, *FURTHER)) > MANY_SAMPLES / 10
    assert detectable_bias(MANY_SAMPLES, found.degrees, FALSE_ALARM) < 0.05


@pytest.mark.long
def test_the_distribution_is_kept_with_four_drafts_and_lost_when_their_distributions_are_mixed_up(
    target: Target,
    distribution: Distribution,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = saved("eagle3", target, tmp_path)

    def mixed_up(parts: list[Part], num_rows: int) -> RoundProposal:
        drafts = joined(parts, num_rows)
        assert drafts.logits is not None
        return drafts._replace(logits=drafts.logits.roll(1, dims=0))

    fits = []
    for put_together in (joined, mixed_up):
        monkeypatch.setattr(drafting, "joined", put_together)
        engine = build_engine(target, new_draft("eagle3", target, 0), CONFIG)
        add_drafts(engine, folders)
        fits.append(fit_swapped(engine, folders, distribution))
        assert (
            min(engine.stats.routed[name] for name in (LIVE, *FURTHER)) > NUM_SAMPLES / 10
            and not engine.stats.fallbacks
        )
    assert fits[0].p_value > FALSE_ALARM > fits[1].p_value, fits


def test_weights_that_are_not_those_that_drafted_are_seen(
    target: Target,
    distribution: Distribution,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: q told as of other weights than those that drew, which is what a swap in the
    middle of a round would do."""
    drafter = new_draft("eagle3", target, 0)
    own = type(drafter).propose

    def torn(self: TrainedDrafter, inputs: DraftInputs) -> Proposal:
        proposal = own(self, inputs)
        assert proposal.logits is not None
        return replace(
            proposal, logits=torch.where(proposal.logits > -torch.inf, -proposal.logits, -torch.inf)
        )

    monkeypatch.setattr(type(drafter), "propose", torn)
    found = fit_swapped(
        build_engine(target, drafter, CONFIG), saved("eagle3", target, tmp_path), distribution
    )
    assert found.p_value < FALSE_ALARM, found
