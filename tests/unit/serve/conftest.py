"""A tiny target and drafters with known behaviour for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.filters import process
from draftsmith.kernels.sampling.random_streams import Purpose, sample
from tests import adjusting
from tests.stand_in_drafts import Uncached


@pytest.fixture(scope="session")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"))


@pytest.fixture(scope="module")
def head(target: Target) -> Eagle3:
    """Untrained."""
    return Eagle3.create(Eagle3Options(), target, seed=1).eval()


class FixedDrafter(Uncached):
    """Without weights: draft logits depend on the token before and the depth. `told` are the logits
    it admits to."""

    family = "fixed"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        vocab_size: int,
        *,
        seed: int = 0,
        sharpness: float = 2.0,
        told_seed: int | None = None,
    ):
        self.table = self._logits(vocab_size, seed, sharpness)
        self.told = (
            self.table if told_seed is None else self._logits(vocab_size, told_seed, sharpness)
        )
        self.calls = 0

    @staticmethod
    def _logits(vocab_size: int, seed: int, sharpness: float) -> torch.Tensor:
        return sharpness * torch.randn(
            16, vocab_size, generator=torch.Generator().manual_seed(seed)
        )

    def propose(self, inputs: DraftInputs) -> Proposal:
        self.calls += 1
        size, depth = len(inputs.num_draft), int(inputs.num_draft.max())
        tokens = torch.full((size, depth), -1)
        logits = torch.full((size, depth, self.table.shape[1]), -torch.inf)
        before = torch.tensor([history[-1] for history in inputs.histories])
        positions = inputs.starts + inputs.lengths
        for step in range(depth):
            rows = (before + step) % len(self.table)
            drawn = sample(
                process(self.table[rows], inputs.sampling),
                inputs.seeds,
                positions + step,
                Purpose.DRAFT,
            )
            logits[:, step] = process(self.told[rows], inputs.sampling)
            tokens[:, step] = before = drawn
        used = torch.arange(depth) < inputs.num_draft[:, None]
        return Proposal(
            tokens=torch.where(used, tokens, -1), lengths=inputs.num_draft, logits=logits
        )


@pytest.fixture(scope="session")
def fixed_drafter(target: Target) -> Callable[..., FixedDrafter]:
    return lambda **options: FixedDrafter(target.vocab_size, **options)


@pytest.fixture(scope="session")
def greedy_text(target: Target) -> Callable[[list[int], int], list[int]]:
    """The target's greedy continuation, with the whole text each time."""

    def continue_(prompt: list[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            _, hidden = target.states(torch.tensor([tokens]), torch.ones(1, len(tokens)), ())
            tokens.append(int(target.head(hidden[0, -1]).argmax()))
        return tokens[len(prompt) :]

    return continue_


@pytest.fixture(scope="session")
def adjusted() -> Callable[..., torch.Tensor]:
    """`tests.adjusting.adjusted`."""
    return adjusting.adjusted
