"""A target small enough that the distribution of its whole texts is known, and drafts for it.

A context is a whole text: the empty one is 0, and token v after context c gives c V + v + 1. So a
distribution may depend on all that stands before it, as penalties do, and the joint distribution of
the first n tokens can still be written down. Before penalties and filters the tables depend on the
last two tokens. Legend: V vocabulary, C contexts, L = `LENGTH`, K = `DEPTH`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.serve.sampling.adjustments import Adjustments
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.sampling.state import SamplingState

LENGTH = 4  # tokens of a text whose joint distribution is tested
DEPTH = 3  # most tokens that a round drafts one after the other
START = 0
VERSIONS = 2  # of the draft, which is swapped now and then


class World(NamedTuple):
    """Processed logits of target and draft in every context."""

    # [K + 1, C, V] float32: the target's, as verification sees them behind 0 .. K drafted tokens
    p_logits: torch.Tensor
    q_logits: torch.Tensor  # [VERSIONS, C, V] float32

    @property
    def vocab_size(self) -> int:
        return self.p_logits.shape[-1]

    def after(self, contexts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The contexts one token later; a negative token, which is none, counts as token 0."""
        return contexts * self.vocab_size + tokens.clamp(min=0) + 1

    def cells(self, contexts: torch.Tensor, counts: torch.Tensor, length: int) -> torch.Tensor:
        """Contexts of at least `length` tokens -> the number of their first `length` tokens in
        `joint_distribution`'s order."""
        for _ in range(int(counts.max()) - length):
            contexts = torch.where(counts > length, (contexts - 1) // self.vocab_size, contexts)
            counts = counts - (counts > length).long()
        return contexts - first_context(length, self.vocab_size)

    def joint_distribution(self, length: int) -> torch.Tensor:
        """The target's distribution of its first `length` tokens, [V ** length] float64, the first
        token most significant."""
        probs = self.p_logits[0].double().softmax(dim=-1)
        joint = torch.ones(1, dtype=torch.float64, device=probs.device)
        for done in range(length):
            first, last = (
                first_context(done, self.vocab_size),
                first_context(done + 1, self.vocab_size),
            )
            joint = (joint[:, None] * probs[first:last]).flatten()
        return joint


def first_context(length: int, vocab_size: int) -> int:
    """The first of the contexts of `length` tokens; they are numbered in the order of
    their tokens."""
    return sum(vocab_size**shorter for shorter in range(length))


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Sampling parameters of an audited case."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalties: SamplingParams | None = None
    draft_temperature: float | None = None  # None: the target's
    draft_filtered: bool = True  # the draft's distribution goes through the same filters
    deterministic: bool = False  # the draft proposes its likeliest tokens and gives no distribution
    likeness: float = 0.7  # how much of the target's logits is in the draft's
    sees_drafts: bool = True  # penalties count the drafted tokens, too; False is a control

    def world(
        self, *, vocab_size: int, seed: int, device: torch.device, offset: float = 0.0
    ) -> World:
        """Random tables; the drafts resemble the target. `offset` moves the logits away from 0, as
        real models' are."""
        generator = torch.Generator().manual_seed(seed)
        shape = vocab_size * vocab_size, vocab_size
        p = 1.5 * torch.randn(shape, generator=generator)
        q = [self.likeness * p + torch.randn(shape, generator=generator) for _ in range(VERSIONS)]
        last_two = _last_two(vocab_size)
        raw_p, raw_q = p[last_two] + offset, torch.stack([table[last_two] + offset for table in q])
        if self.penalties is not None:
            raw_p = penalised(self.penalties, raw_p, vocab_size, behind=0)
            raw_q = torch.stack(
                [penalised(self.penalties, table, vocab_size, behind=0) for table in raw_q]
            )
        p_logits = self._process(raw_p, self.temperature, filtered=True)
        tables = p_logits.expand(DEPTH + 1, -1, -1)
        if self.penalties is not None and not self.sees_drafts:
            raw = p[last_two] + offset
            blind = [
                penalised(self.penalties, raw, vocab_size, behind=behind)
                for behind in range(DEPTH + 1)
            ]
            tables = torch.stack(
                [self._process(table, self.temperature, filtered=True) for table in blind]
            )
        temperature = self.temperature if self.draft_temperature is None else self.draft_temperature
        q_logits = torch.stack(
            [self._process(table, temperature, filtered=self.draft_filtered) for table in raw_q]
        )
        return World(tables.to(device), q_logits.to(device))

    def _process(self, logits: torch.Tensor, temperature: float, *, filtered: bool) -> torch.Tensor:
        count = len(logits)
        rows = SamplingRows.of(
            [temperature] * count,
            top_k=[self.top_k if filtered else 0] * count,
            top_p=[self.top_p if filtered else 1.0] * count,
            min_p=[self.min_p if filtered else 0.0] * count,
        )
        return process(logits, rows)


def penalised(
    params: SamplingParams, raw: torch.Tensor, vocab_size: int, *, behind: int
) -> torch.Tensor:
    """Raw logits [C, V] as the engine's own pipeline adjusts them when the last `behind` tokens of
    every context are left out of account. Distributions behind `LENGTH` tokens stay as they are: no
    token of theirs is tested, and any distribution will do there."""
    states = [
        _state(params, text[: max(len(text) - behind, 0)], vocab_size)
        for text in _texts(vocab_size)
    ]
    adjusted = Adjustments(states).apply(raw[: len(states)], range(len(states)), [[]] * len(states))
    return torch.cat([adjusted, raw[len(states) :]])


def split_error(
    params: SamplingParams, vocab_size: int, adjust: Callable[..., torch.Tensor] = Adjustments.apply
) -> float:
    """Largest difference between distributions adjusted behind drafted tokens and behind the same
    tokens committed, over all texts shorter than `LENGTH` and all ways to split them."""
    texts = _texts(vocab_size)
    raw = torch.randn(len(texts), vocab_size, generator=torch.Generator().manual_seed(0))
    whole = Adjustments([_state(params, text, vocab_size) for text in texts]).apply(
        raw, range(len(texts)), [[]] * len(texts)
    )
    error = 0.0
    for drafted in range(1, LENGTH):
        long = [place for place, text in enumerate(texts) if len(text) >= drafted]
        states = [
            _state(params, texts[place][: len(texts[place]) - drafted], vocab_size)
            for place in long
        ]
        prefixes = [texts[place][len(texts[place]) - drafted :] for place in long]
        found = adjust(Adjustments(states), raw[long], range(len(long)), prefixes)
        same = found == whole[long]  # both -inf is the same, too
        error = max(error, float(torch.where(same, 0, (found - whole[long]).abs()).max()))
    return error


def _state(params: SamplingParams, text: list[int], vocab_size: int) -> SamplingState:
    # The text begins with one token of the prompt, which a repetition penalty counts, too.
    state = SamplingState(
        params, num_prompt=1, vocab_size=vocab_size, eos_token_ids=(), device=torch.device("cpu")
    )
    state.follow([0, *text])
    return state


def _texts(vocab_size: int) -> list[list[int]]:
    """Tokens of every context of fewer than `LENGTH` tokens, in their order."""
    texts: list[list[int]] = [[]]
    level = texts
    for _ in range(LENGTH - 1):
        level = [[*text, token] for text in level for token in range(vocab_size)]
        texts = texts + level
    return texts


def _last_two(vocab_size: int) -> torch.Tensor:
    """[C]: the last two tokens of every context as one number; before the start they are 0."""
    contexts = torch.arange(first_context(LENGTH + DEPTH, vocab_size))
    above = (contexts - 1).clamp(min=0) // vocab_size
    newest, older = (contexts - 1) % vocab_size, (above - 1) % vocab_size
    return torch.where(above > 0, older, 0) * vocab_size + torch.where(contexts > 0, newest, 0)
