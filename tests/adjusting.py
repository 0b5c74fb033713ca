"""Adjustments of target logits: ours, for tests that have rows and drafted tokens as lists, and
transformers' own, as the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from draftsmith.serve.sampling.adjustments import Adjustments
from draftsmith.serve.sampling.params import SamplingParams


def apply(
    adjust: Adjustments,
    logits: torch.Tensor,
    owners: Sequence[int],
    prefixes: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Row r of `logits` [R, V] is that of request `owners[r]` behind the drafted `prefixes[r]`."""
    width = max(map(len, prefixes), default=0)
    padded = [[*one, *[-1] * (width - len(one))] for one in prefixes]
    drafted = torch.tensor(padded, dtype=torch.int64).view(len(padded), width)
    rows = torch.tensor(list(owners), dtype=torch.int64)
    known = [list(one) for one in prefixes]
    device = logits.device
    return adjust.apply(logits, rows.to(device), drafted.to(device), owners, known)


def chain_prefixes(*chains: list[int]) -> tuple[list[int], list[list[int]]]:
    """Owner and drafted prefix of every row of logits."""
    owners = [owner for owner, chain in enumerate(chains) for _ in range(len(chain) + 1)]
    return owners, [chain[:count] for chain in chains for count in range(len(chain) + 1)]


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


def adjusted(
    params: SamplingParams,
    text: list[int],
    num_prompt: int,
    eos_token_ids: Collection[int],
    scores: torch.Tensor,
) -> torch.Tensor:
    """Raw scores [V] of the token behind `text` as transformers' own processors, in transformers'
    own order, hand them to its warpers."""
    processors = _processors(params, num_prompt, eos_token_ids)
    return processors(torch.tensor([text]), scores[None].clone())[0]
