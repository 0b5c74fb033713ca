"""Whole generations by speculation over a small Markov target whose joint law is known exactly.

Target and draft are tables over the last two tokens, so every round sees other laws, rounds follow one another through the
real random streams, and the joint law of the first n tokens can be written down. Legend: V vocabulary, C = V * V contexts,
B sequences, K depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftsmith.kernels.filters import SamplingRows, process
from draftsmith.kernels.randomness import Purpose, sample
from draftsmith.kernels.verify import Verdict, verify_chain

START = 0  # the context before the first token


class MarkovPair(NamedTuple):
    """Processed logits of target and draft."""

    p_logits: torch.Tensor  # [C, V] float32
    q_logits: torch.Tensor  # [C, V] float32

    @property
    def vocab_size(self) -> int:
        return self.p_logits.shape[-1]


@dataclass(frozen=True, kw_only=True)
class Law:
    """Sampling parameters of an audited case."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    draft_temperature: float | None = None  # None: the target's
    deterministic: bool = False  # the draft proposes its likeliest token and tells no law

    def process(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        count = len(logits)
        rows = SamplingRows.of(
            [temperature] * count, top_k=[self.top_k] * count, top_p=[self.top_p] * count, min_p=[self.min_p] * count
        )
        return process(logits, rows)

    def pair(self, *, vocab_size: int, seed: int, device: torch.device, offset: float = 0.0) -> MarkovPair:
        """Random tables; the draft resembles the target. `offset` moves the logits away from 0, as real models' are."""
        generator = torch.Generator().manual_seed(seed)
        contexts = vocab_size * vocab_size
        p = 1.5 * torch.randn(contexts, vocab_size, generator=generator)
        q = 0.7 * p + torch.randn(contexts, vocab_size, generator=generator)
        draft_temperature = self.temperature if self.draft_temperature is None else self.draft_temperature
        p, q = self.process(p + offset, self.temperature), self.process(q + offset, draft_temperature)
        return MarkovPair(p.to(device), q.to(device))


@dataclass(frozen=True, kw_only=True)
class Procedure:
    """How rounds are run. The defaults are the product's; each negative control replaces one of them."""

    draft_purpose: Purpose = Purpose.DRAFT
    told: Callable[[torch.Tensor], torch.Tensor] = lambda q_logits: q_logits  # the draft law as verification is told it
    truncate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = lambda lengths, drafts, q_logits: lengths
    verify: Callable[..., Verdict] = verify_chain


class Generations(NamedTuple):
    tokens: torch.Tensor  # [B, length]
    num_rounds: int


def generate(
    pair: MarkovPair,
    law: Law,
    procedure: Procedure,
    *,
    seeds: torch.Tensor,
    length: int,
    depth: int,
    impl: str = "auto",
) -> Generations:
    """`length` tokens of each of the sequences `seeds` [B], by rounds of 0 to `depth` drafted tokens."""
    tokens = torch.zeros(len(seeds), length + depth + 1, dtype=torch.int64, device=seeds.device)
    counts = torch.zeros_like(seeds)
    num_rounds = 0
    rows = torch.arange(len(seeds), device=seeds.device)
    while len(rows):
        # Ragged on purpose, and decided before anything of the round is drawn.
        lengths = (rows * 5 + counts[rows] * 3 + 2) % (depth + 1)
        before = _context(tokens[rows], counts[rows], pair.vocab_size)
        verdict = _round(pair, law, procedure, before, lengths, seeds[rows], counts[rows], depth, impl)
        places = counts[rows, None] + torch.arange(depth + 1, device=seeds.device)
        emitted = torch.arange(depth + 1, device=seeds.device) <= verdict.accepted[:, None]
        kept = tokens[rows].gather(1, places)
        tokens[rows] = tokens[rows].scatter(1, places, torch.where(emitted, verdict.tokens, kept))
        counts[rows] += verdict.accepted + 1
        num_rounds += len(rows)
        rows = rows[counts[rows] < length]
    return Generations(tokens[:, :length], num_rounds)


def _round(
    pair: MarkovPair,
    law: Law,
    procedure: Procedure,
    before: torch.Tensor,
    lengths: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    depth: int,
    impl: str,
) -> Verdict:
    contexts, drafts = [before], []
    for step in range(depth):
        q_logits = pair.q_logits[contexts[-1]]
        if law.deterministic:
            drafts.append(q_logits.argmax(dim=-1))
        else:
            drafts.append(sample(q_logits, seeds, positions + step, procedure.draft_purpose))
        contexts.append(contexts[-1] % pair.vocab_size * pair.vocab_size + drafts[-1])
    visited, drafted = torch.stack(contexts, dim=1), torch.stack(drafts, dim=1)
    q_logits = pair.q_logits[visited[:, :-1]]
    lengths = procedure.truncate(lengths, drafted, q_logits)
    verified = torch.arange(depth + 1, device=lengths.device) <= lengths[:, None]
    p_logits = pair.p_logits[visited[verified]]
    told = None if law.deterministic else procedure.told(q_logits)
    return procedure.verify(p_logits, drafted, lengths, told, seeds, positions, impl=impl)


def _context(tokens: torch.Tensor, counts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The last two tokens as one number; before the start they are 0."""
    padded = torch.nn.functional.pad(tokens, (2, 0), value=START)
    last_two = padded.gather(1, counts[:, None] + torch.arange(2, device=tokens.device))
    return last_two[:, 0] * vocab_size + last_two[:, 1]


def joint_law(p_logits: torch.Tensor, length: int) -> torch.Tensor:
    """[C, V] -> the target's law of its first `length` tokens, [V ** length] float64, the first token most significant."""
    vocab_size = p_logits.shape[-1]
    probs = p_logits.double().softmax(dim=-1)
    contexts = torch.full((1,), START, dtype=torch.int64, device=p_logits.device)
    joint = torch.ones(1, dtype=torch.float64, device=p_logits.device)
    for _ in range(length):
        joint = (joint[:, None] * probs[contexts]).flatten()
        contexts = (contexts[:, None] % vocab_size * vocab_size + torch.arange(vocab_size, device=p_logits.device)).flatten()
    return joint


def cells(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[B, length] -> the number of each sequence in `joint_law`'s order."""
    powers = vocab_size ** torch.arange(tokens.shape[1] - 1, -1, -1, device=tokens.device)
    return (tokens * powers).sum(dim=1)
