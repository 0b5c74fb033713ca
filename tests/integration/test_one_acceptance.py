"""What `eval` says offline is what the engine does: the same draft, the same text, the
same rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.options import DraftOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.train.command import run
from draftsmith.train.config import OptimConfig, TrainConfig
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.teacher_forced import DraftRule, count_documents
from tests.data_folders import rows_of, write_rows

pytestmark = pytest.mark.long

K = 3


@dataclass(frozen=True)
class Pair:
    target: Target
    drafter: TrainedDrafter


def some_prompts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, 288, (3 + number % 6,), generator=generator).tolist()
        for number in range(count)
    ]


WINDOWED = DraftOptions(window=5)  # less than a prompt


@pytest.fixture(scope="module", params=["eagle3 window", *FAMILIES])
def pair(
    request: pytest.FixtureRequest, target_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    """A tiny target and a draft trained on its answers, sampled and greedy, until it is right about
    a third of the time."""
    target = Target.load(target_folder)
    folder: Path = tmp_path_factory.mktemp(request.param)
    prompts, rows = some_prompts(32, seed=0), []
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "ignore_eos": True, "batch_size": 32}
        rows += rows_of(prompts, target.answer(prompts, max_new_tokens=16, **options))
    write_rows(folder, rows)
    config = TrainConfig(
        family=request.param.split()[0], draft=WINDOWED if "window" in request.param else None,
        target=target.name, data=str(folder), out=str(folder / "draft"), dtype="float32", steps=60,
        held_out=0.0, optim=OptimConfig(lr=1e-2),
    )  # fmt: skip
    run(config)
    return Pair(target, checkpoint.load(config.out, target))


def speculate(
    pair: Pair, temperature: float, count: int, **options: str
) -> tuple[list[TokenSequence], torch.Tensor]:
    """Texts that the engine wrote, without their first token, which no draft precedes; and the
    rounds it took for the rest."""
    engine = build_engine(pair.target, pair.drafter, EngineConfig(k=K, max_batch=16, **options))
    prompts = some_prompts(count, seed=1)
    params = SamplingParams(temperature=temperature, max_tokens=21, ignore_eos=True)
    completions = engine.generate(prompts, params)
    sequences, rounds = [], []
    for number, (prompt, completion) in enumerate(zip(prompts, completions)):
        ids = torch.tensor(prompt + completion.tokens)
        sequences.append(TokenSequence(f"{number}", ids, torch.arange(len(ids)) > len(prompt)))
        rounds.append(completion.speculation.num_passes - 1)
    return sequences, torch.tensor(rounds, dtype=torch.float64)


def expected(
    pair: Pair,
    sequences: list[TokenSequence],
    temperature: float,
    k: int = K,
    sampling: str = "sampled",
) -> torch.Tensor:
    counts = count_documents(
        pair.drafter, pair.target, sequences, DraftRule(temperature, k, sampling), batch_size=50
    )
    rounds = {count.name: count.whole.rounds for count in counts}
    return torch.tensor([rounds[sequence.name] for sequence in sequences], dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_of_likeliest_drafts_are_the_same_number(pair, temperature):
    """Also at temperature 1, as vLLM drafts by default: which of them a text holds is settled."""
    sequences, rounds = speculate(pair, temperature, 24, draft_sampling="greedy")
    assert rounds.sum() < 24 * 20, "something must be accepted for this to say anything"
    found = expected(pair, sequences, temperature, sampling="greedy")
    assert found.tolist() == pytest.approx(rounds.tolist())
    # Negative control: drafts that are drawn.
    drawn = expected(pair, sequences, temperature)
    assert (drawn.tolist() == pytest.approx(rounds.tolist())) is (temperature == 0)


def test_sampled_rounds_have_the_expected_mean(pair):
    """Given a text, its rounds are random with the walk's mean: the paired difference has mean
    zero."""
    sequences, rounds = speculate(pair, 1.0, 150)
    assert rounds.mean() < 17

    def z(predicted: torch.Tensor) -> float:
        difference = rounds - predicted
        return abs(float(difference.mean() / (difference.std() / len(difference) ** 0.5)))

    # False alarm: 6e-5 a family. Negative control: the walk of a shorter chain is told apart.
    assert z(expected(pair, sequences, 1.0)) < 4.0
    assert z(expected(pair, sequences, 1.0, k=1)) > 4.0
