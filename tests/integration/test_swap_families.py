"""Swaps before every single round, for every trained family: greedy text is identical, the joint law of sampled text is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import DraftInputs, Proposal, TrainedDrafter
from draftsmith.drafters.options import OPTIONS, DraftLmOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target import Target
from draftsmith.kernels.filters import SamplingRows, process
from draftsmith.kernels.statistics import Fit, chi_square, detectable_bias
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine import Engine
from draftsmith.serve.request import SamplingParams

PROMPTS = [[5, 60, 7, 200, 9, 33], [9, 8, 7], [100, 4, 100, 4, 100, 4, 77]]
FALSE_ALARM = 1e-6
NUM_SAMPLES, LENGTH = 1024, 3
# Few tokens and flat laws, so that drafts without training are accepted often.
ALLOWED = (7, 34, 51, 146, 180)
TEMPERATURE = 2.0


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("qwen3"))


def new_draft(family: str, target: Target, seed: int) -> TrainedDrafter:
    options = DraftLmOptions(num_layers=1, hidden_size=32) if family == "draft-lm" else OPTIONS[family]()
    return (
        FAMILIES[family].create(options, target, seed=seed, token_counts=torch.ones(target.vocab_size, dtype=torch.int64)).eval()
    )


def saved(family: str, target: Target, root: Path) -> list[str]:
    folders = [root / str(seed) for seed in (1, 2)]
    for seed, folder in enumerate(folders, 1):
        checkpoint.save(new_draft(family, target, seed), folder, target)
    return [str(folder) for folder in folders]


def run(engine: Engine, folders: list[str]) -> int:
    """Until nobody is left, each round with other weights than the one before; returns the rounds."""
    rounds = 0
    while engine.scheduler.busy:
        engine.swap(folders[rounds % 2], str(rounds))
        engine.step()
        rounds += 1
    return rounds


@pytest.mark.parametrize("family", list(OPTIONS))
def test_greedy_text_is_the_same_with_a_swap_before_every_round(family: str, target: Target, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = [one.tokens for one in Engine(target, None, EngineConfig(compile="off")).generate(PROMPTS, params)]
    engine = Engine(target, new_draft(family, target, 0), EngineConfig(k=3, compile="off"))
    requests = [engine.submit(prompt, params) for prompt in PROMPTS]
    rounds = run(engine, saved(family, target, tmp_path))
    assert [request.output for request in requests] == expected
    assert engine.stats.num_swaps == rounds > 5 and engine.stats.num_draft_tokens > 0 and not engine.stats.fallbacks


@pytest.fixture(scope="module")
def law(target: Target) -> dict[tuple[int, ...], float]:
    """Every answer of LENGTH tokens with its probability, by enumeration under the target."""
    rows = SamplingRows.of([TEMPERATURE])
    others = torch.ones(target.vocab_size, dtype=torch.bool).index_fill(0, torch.tensor(ALLOWED), False)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, mass in law.items():
            tokens = torch.tensor([PROMPTS[0] + list(text)])
            _, hidden = target.states(tokens, torch.ones_like(tokens), ())
            probs = torch.softmax(
                process(target.head(hidden[0, -1:]).float().masked_fill(others, -torch.inf), rows).double(), -1
            )[0]
            longer |= {(*text, token): mass * float(probs[token]) for token in probs.nonzero()[:, 0].tolist()}
        law = longer
    return law


def fit(engine: Engine, folders: list[str], law: dict[tuple[int, ...], float]) -> Fit:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=TEMPERATURE, allowed_token_ids=ALLOWED)
    requests = [engine.submit(PROMPTS[0], replace(params, seed=seed), text=False) for seed in range(NUM_SAMPLES)]
    run(engine, folders)
    texts = {text: index for index, text in enumerate(law)}
    counts = torch.zeros(len(law) + 1)
    for request in requests:
        counts[texts.get(tuple(request.output), len(law))] += 1
    return chi_square(counts, torch.tensor([*law.values(), 0.0], dtype=torch.float64))


CONFIG = EngineConfig(k=2, max_batch=64, max_queue=NUM_SAMPLES, max_length=64, max_round_tokens=1024, compile="off")
LONG = [pytest.param(family, marks=pytest.mark.long) for family in OPTIONS if family not in ("eagle3", "dspark")]


@pytest.mark.parametrize("family", ["eagle3", "dspark", *LONG])
def test_the_joint_law_is_kept_with_a_swap_before_every_round(
    family: str, target: Target, law: dict[tuple[int, ...], float], tmp_path: Path
) -> None:
    engine = Engine(target, new_draft(family, target, 0), CONFIG)
    found = fit(engine, saved(family, target, tmp_path), law)
    assert found.p_value > FALSE_ALARM, found
    assert engine.stats.num_swaps > 20 and engine.stats.num_accepted_tokens > NUM_SAMPLES / 2 and not engine.stats.fallbacks
    assert detectable_bias(NUM_SAMPLES, found.degrees, FALSE_ALARM) < 0.35


def test_weights_that_are_not_those_that_drafted_are_seen(
    target: Target, law: dict[tuple[int, ...], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: q told as of other weights than those that drew, which is what a swap in the middle of a round would do."""
    drafter = new_draft("eagle3", target, 0)
    own = type(drafter).propose

    def torn(self: TrainedDrafter, inputs: DraftInputs) -> Proposal:
        proposal = own(self, inputs)
        assert proposal.logits is not None
        return replace(proposal, logits=torch.where(proposal.logits > -torch.inf, -proposal.logits, -torch.inf))

    monkeypatch.setattr(type(drafter), "propose", torn)
    found = fit(Engine(target, drafter, CONFIG), saved("eagle3", target, tmp_path), law)
    assert found.p_value < FALSE_ALARM, found
