"""Who writes the answers of a dataset: the target, an OpenAI-compatible server, or nobody, when the prompts hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from draftsmith.distill.config import GenerateConfig
from draftsmith.distill.generate.prompts import Prompt
from draftsmith.drafters.target.target import Target


class Written(NamedTuple):
    ids: list[int]  # prompt and answer
    mask: list[int]  # 1 = a token of the answer


class Writer(Protocol):
    def write(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Written]:
        """Of a batch; `seeds` are of the prompts."""
        ...


class TargetWriter:
    def __init__(self, target: Target, config: GenerateConfig):
        self.target, self.config = target, config

    def write(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Written]:
        answers = self.target.answer(
            [prompt.ids for prompt in prompts],
            max_new_tokens=self.config.max_tokens,
            temperature=self.config.temperature,
            top_k=self.config.top_k,
            top_p=self.config.top_p,
            seeds=seeds,
            batch_size=len(prompts),
        )
        return [continued(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


class GivenWriter:
    """The prompts are whole texts with masks."""

    def write(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Written]:
        return [Written(prompt.ids, prompt.mask or []) for prompt in prompts]


def continued(prompt: Prompt, answer: Sequence[int]) -> Written:
    return Written([*prompt.ids, *answer], [0] * len(prompt.ids) + [1] * len(answer))


def seed_of(seed: int, index: int) -> int:
    """Each prompt has its own random stream, so that its answer does not depend on where a run was interrupted."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "big") >> 1
