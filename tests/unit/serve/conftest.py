"""A tiny target and drafters with known behaviour for the engine's tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.filters import process
from draftsmith.kernels.sampling.random_streams import Purpose, sample
from draftsmith.serve.sampling.params import SamplingParams
from tests.stand_in_drafts import Uncached


@pytest.fixture(scope="session")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"))


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


class OpenAiPenalties:
    """By the formula of OpenAI's documentation; transformers has none."""

    def __init__(self, params: SamplingParams, num_prompt: int):
        self.params, self.num_prompt = params, num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.num_prompt :].tolist()).items():
            # Rounded to the scores' type before it is multiplied, as everybody does who keeps
            # counts in a tensor.
            scores[0, token] -= (
                torch.tensor(self.params.frequency_penalty, dtype=scores.dtype) * count
            )
            scores[0, token] -= self.params.presence_penalty
        return scores


class OnlyAllowed:
    """Not transformers' `PrefixConstrainedLogitsProcessor`: where every allowed token is banned,
    that one lifts the ban."""

    def __init__(self, allowed: Collection[int]):
        self.allowed = list(allowed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, -torch.inf)
        only[:, self.allowed] = scores[:, self.allowed]
        return only


class NoBadWords:
    """transformers' processor. 5.16 overlooks a word of one token more than the whole text, so the
    text gets a token before it that no word holds."""

    def __init__(self, words: Collection[Collection[int]]):
        self.processor = NoBadWordsLogitsProcessor([list(word) for word in words])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.processor(torch.nn.functional.pad(input_ids, (1, 0), value=-1), scores)


def _processors(
    params: SamplingParams, num_prompt: int, eos_token_ids: Collection[int]
) -> LogitsProcessorList:
    chosen = LogitsProcessorList()
    if params.logit_bias:
        chosen.append(
            SequenceBiasLogitsProcessor(
                {(token,): float(bias) for token, bias in params.logit_bias}
            )
        )
    if params.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chosen.append(OpenAiPenalties(params, num_prompt))
    if params.bad_words:
        chosen.append(NoBadWords(params.bad_words))
    ends = [*eos_token_ids, *params.stop_token_ids]
    if params.min_tokens and ends:
        chosen.append(MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, ends))
    if params.allowed_token_ids is not None:
        chosen.append(OnlyAllowed(params.allowed_token_ids))
    chosen.extend(params.logits_processors)
    return chosen


Adjusted = Callable[[SamplingParams, list[int], int, Collection[int], torch.Tensor], torch.Tensor]


@pytest.fixture(scope="session")
def adjusted() -> Adjusted:
    """`adjusted(params, text, num_prompt, eos_token_ids, scores)`: raw scores [V] of the token
    behind `text` as transformers' own processors, in transformers' own order, hand them to its
    warpers."""

    def apply(
        params: SamplingParams,
        text: list[int],
        num_prompt: int,
        eos_token_ids: Collection[int],
        scores: torch.Tensor,
    ) -> torch.Tensor:
        return _processors(params, num_prompt, eos_token_ids)(
            torch.tensor([text]), scores[None].clone()
        )[0]

    return apply
