"""The joint distribution of whole sampled answers under penalties, bans and a grammar is the
enumerated one; broken ways are caught."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.statistics import Fit, detectable_bias, g_test
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.round import RowSampling
from draftsmith.serve.engine.scheduler import ScheduledRow
from draftsmith.serve.requests.request import Request, RequestOptions, Update
from draftsmith.serve.sampling.adjustments import Adjustments
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.sampling.tables import CountedTexts
from tests.stand_in_drafts import near

PROMPT = [40, 41, 42, 40]
LENGTH = 4  # tokens looked at
MORE = 16  # asked for beyond them, so that drafts are as deep, and trees as large, to the last one
FALSE_ALARM = 1e-6
NUM_SAMPLES = 1500
FEW = (40, 41, 42, 43, 0)

PENALTIES = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    repetition_penalty=1.4,
    presence_penalty=0.7,
    frequency_penalty=1.2,
    allowed_token_ids=FEW[:-1],
    max_tokens=LENGTH + MORE,
)
BANS = SamplingParams(
    temperature=1.3,
    min_p=0.02,
    allowed_token_ids=FEW,
    bad_words=((40, 41), (42, 42), (43, 40, 43)),
    min_tokens=2,
    logit_bias=((0, 4.0), (41, -1.0)),
    max_tokens=LENGTH + MORE,
)
GRAMMAR = SamplingParams(
    temperature=1.5,
    top_k=8,
    grammar=Grammar.regex("[abd]{1,2}c"),
    max_tokens=LENGTH + MORE,
    frequency_penalty=0.5,
)
CASES = {"penalties": PENALTIES, "bans": BANS, "grammar": GRAMMAR}

TREES = ["dynamic:nodes=8,depth=3,width=3", "sampled:3x2x1"]

Distribution = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def drafter(target: Target) -> DraftLm:
    return near(target, 0.03)


def grammatical(target: Target, text: list[int]) -> torch.Tensor:
    """[V] bool, for GRAMMAR's pattern: which tokens leave a beginning of a match, and the end
    behind a whole one."""
    tokenizer = target.tokenizer()
    so_far = tokenizer.decode(text)
    pieces = [
        tokenizer.decode([token], skip_special_tokens=True) for token in range(target.vocab_size)
    ]
    mask = torch.tensor(
        [
            bool(piece) and bool(re.fullmatch("[abd]{0,2}|[abd]{1,2}c", so_far + piece))
            for piece in pieces
        ]
    )
    mask[list(target.eos_token_ids)] = bool(re.fullmatch("[abd]{1,2}c", so_far))
    return mask


def enumerated(target: Target, params: SamplingParams, adjusted: Callable) -> Distribution:
    """Every answer with its probability, by transformers' processors over the target's logits."""
    rows = SamplingRows.of(
        [params.temperature], top_k=[params.top_k], top_p=[params.top_p], min_p=[params.min_p]
    )
    done: Distribution = {}
    growing: Distribution = {(): 1.0}
    while growing:
        answer, mass = growing.popitem()
        if len(answer) == LENGTH or (answer and answer[-1] in target.eos_token_ids):
            done[answer] = mass
            continue
        text = [*PROMPT, *answer]
        _, hidden = target.states(torch.tensor([text]), torch.ones(1, len(text)), ())
        scores = adjusted(
            params, text, len(PROMPT), target.eos_token_ids, target.head(hidden[0, -1]).float()
        )
        if params.grammar is not None:
            scores = scores.masked_fill(~grammatical(target, list(answer)), -torch.inf)
        probs = torch.softmax(process(scores[None], rows).double(), -1)[0]
        growing |= {
            (*answer, token): mass * float(probs[token]) for token in probs.nonzero()[:, 0].tolist()
        }
    return done


CONFIG = EngineConfig(
    k=3, max_batch=128, max_length=32, max_round_tokens=4096, max_queue=99_999, seed=7
)


def drafted(way: str, target: Target, drafter: DraftLm) -> tuple[ServingDrafter, EngineConfig]:
    """A drafter and its settings, for "block" or one of `TREES`."""
    if way == "block":
        return drafter, replace(CONFIG, verification="block")
    return Eagle3.create(Eagle3Options(), target, seed=1).eval(), replace(CONFIG, tree=way)


def fit(
    target: Target,
    drafter: ServingDrafter,
    config: EngineConfig,
    params: SamplingParams,
    distribution: Distribution,
    *,
    num_samples: int = NUM_SAMPLES,
) -> Fit:
    """Of the first LENGTH tokens of answers, which are then cancelled; some drafts of every depth
    are kept."""
    engine = build_engine(target, drafter, config)

    def stop(request: Request, update: Update) -> None:
        if len(request.output) >= LENGTH:
            engine.cancel(request)

    requests = [
        engine.submit(PROMPT, params, stop, options=RequestOptions(text=False))
        for _ in range(num_samples)
    ]
    while engine.busy:
        engine.step()
    answers = Counter(tuple(request.output[:LENGTH]) for request in requests)
    assert min(engine.stats.offered[at] for at in range(config.k)) > num_samples / 4, (
        engine.stats.offered
    )
    assert min(engine.stats.accepted[at] for at in range(config.k)) > num_samples / 50, (
        engine.stats.accepted
    )
    assert not engine.stats.fallbacks
    cells = [*distribution, *(answers.keys() - distribution.keys())]
    counts = torch.tensor([answers[cell] for cell in cells])
    return g_test(
        counts, torch.tensor([distribution.get(cell, 0.0) for cell in cells], dtype=torch.float64)
    )


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_joint_distribution_of_answers_is_the_enumerated_one(
    target: Target, drafter: DraftLm, adjusted: Callable, name: str
) -> None:
    distribution = enumerated(target, CASES[name], adjusted)
    assert abs(sum(distribution.values()) - 1) < 1e-9 and len(distribution) > 5
    found = fit(target, drafter, CONFIG, CASES[name], distribution)
    assert found.p_value > FALSE_ALARM, found
    assert detectable_bias(NUM_SAMPLES, found.degrees, FALSE_ALARM) < 0.15


@pytest.mark.long
@pytest.mark.parametrize("tree", TREES)
def test_the_joint_distribution_of_answers_drafted_as_trees_is_the_enumerated_one(
    target: Target, drafter: DraftLm, adjusted: Callable, tree: str
) -> None:
    """Every node is adjusted with the tokens on the way to it."""
    distribution = enumerated(target, PENALTIES, adjusted)
    found = fit(target, *drafted(tree, target, drafter), PENALTIES, distribution)
    assert found.p_value > FALSE_ALARM, found
    assert detectable_bias(NUM_SAMPLES, found.degrees, FALSE_ALARM) < 0.15


@pytest.mark.parametrize("name", ["penalties", "bans"])
def test_the_joint_distribution_of_chains_judged_as_blocks_is_the_enumerated_one(
    target: Target, drafter: DraftLm, adjusted: Callable, name: str
) -> None:
    distribution = enumerated(target, CASES[name], adjusted)
    found = fit(target, *drafted("block", target, drafter), CASES[name], distribution)
    assert found.p_value > FALSE_ALARM, found
    assert detectable_bias(NUM_SAMPLES, found.degrees, FALSE_ALARM) < 0.15


def test_every_round_is_drafted_with_noise_of_its_own() -> None:
    """What was thrown away may have been looked at (tests/integration/test_fresh_noise.py)."""
    requests = [
        Request("", [1] * length, 1, PENALTIES, seed=7, k=3, max_tokens=4) for length in (5, 6)
    ]
    rows = [ScheduledRow(request, 1, 1, 3) for request in requests]
    seeds = RowSampling(rows, torch.device("cpu")).draft_seeds
    assert len({7, *seeds.tolist()}) == 3


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_the_joint_distribution_of_many_answers(
    target: Target, drafter: DraftLm, adjusted: Callable, name: str
) -> None:
    distribution = enumerated(target, CASES[name], adjusted)
    found = fit(target, drafter, CONFIG, CASES[name], distribution, num_samples=30_000)
    assert found.p_value > 1e-9, found
    assert detectable_bias(30_000, found.degrees, 1e-9) < 0.04


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["block", *TREES])
def test_the_joint_distribution_of_many_answers_by_blocks_and_trees(
    target: Target, drafter: DraftLm, adjusted: Callable, way: str
) -> None:
    """A total variation of 0.05 would be seen."""
    distribution = enumerated(target, PENALTIES, adjusted)
    found = fit(target, *drafted(way, target, drafter), PENALTIES, distribution, num_samples=20_000)
    assert found.p_value > 1e-9, found
    assert detectable_bias(20_000, found.degrees, 1e-9) < 0.05


@pytest.mark.long
@pytest.mark.parametrize("name", ["penalties", "bans"])
def test_leaving_the_drafted_tokens_out_is_caught(
    target: Target, drafter: DraftLm, adjusted: Callable, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    distribution = enumerated(target, CASES[name], adjusted)
    apply = Adjustments.apply
    monkeypatch.setattr(
        Adjustments,
        "apply",
        lambda self, logits, rows, drafted, owners, prefixes: apply(
            self, logits, rows, drafted[:, :0], owners, [[] for _ in prefixes]
        ),
    )
    assert fit(target, drafter, CONFIG, CASES[name], distribution).p_value < FALSE_ALARM


def test_a_penalty_left_out_is_caught(
    target: Target, drafter: DraftLm, adjusted: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution = enumerated(target, PENALTIES, adjusted)
    monkeypatch.setattr(CountedTexts, "penalise", lambda self, *given: None)
    assert fit(target, drafter, CONFIG, PENALTIES, distribution).p_value < FALSE_ALARM


def newest(drafted: torch.Tensor) -> torch.Tensor:
    """The last one of each row's drafted tokens alone."""
    columns = torch.arange(drafted.shape[1]).expand_as(drafted)
    last = torch.where(drafted >= 0, columns, -1).amax(dim=1, keepdim=True)
    return drafted.masked_fill(columns != last, -1)


@pytest.mark.long
@pytest.mark.parametrize("way", ["block", *TREES])
def test_counting_the_newest_drafted_token_alone_is_caught(
    target: Target, drafter: DraftLm, adjusted: Callable, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A mistake that only grandchildren and later tokens of a block can show."""
    apply = Adjustments.apply
    monkeypatch.setattr(
        Adjustments,
        "apply",
        lambda self, logits, rows, drafted, owners, prefixes: apply(
            self, logits, rows, newest(drafted), owners, prefixes
        ),
    )
    distribution = enumerated(target, PENALTIES, adjusted)
    found = fit(target, *drafted(way, target, drafter), PENALTIES, distribution, num_samples=700)
    assert found.p_value < FALSE_ALARM, found
