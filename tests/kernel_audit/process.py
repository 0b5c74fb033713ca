"""Whole generations by speculation in a small world, round after round through the real random
streams.

Legend: B sequences, K depth, N nodes of a tree, V vocabulary, C contexts (see `world.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from draftsmith.kernels.sampling.random_streams import (
    Purpose,
    round_seeds,
    sample,
    sample_without_replacement,
)
from draftsmith.kernels.statistics import Fit, g_test
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.draft_tree import DraftTree
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import TreeVerdict, Verdict
from tests.kernel_audit.world import DEPTH, LENGTH, START, VERSIONS, Distribution, World

# Three children, of which the first has two and the second one, and one more below: a tree of depth
# 3.
TREE = (-1, -1, -1, 0, 0, 1, 3)

VOCAB_SIZE = 5
BATCH = 25_000  # sequences generated at a time


class Round(NamedTuple):
    """State of the round before anything of it is drawn."""

    contexts: torch.Tensor  # [B]
    lengths: torch.Tensor  # [B], drafted tokens of the round
    versions: torch.Tensor  # [B], of the draft
    seeds: torch.Tensor  # [B]
    positions: torch.Tensor  # [B], of the first drafted token


class Procedure(Protocol):
    """Procedure of one round; `most` is the largest number of tokens it drafts."""

    @property
    def most(self) -> int: ...

    def run(
        self, world: World, round: Round, *, deterministic: bool, impl: str
    ) -> Verdict | TreeVerdict: ...


def draw_draft(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return sample(logits, seeds, positions, Purpose.DRAFT)


def draw_siblings(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, count: int
) -> torch.Tensor:
    return sample_without_replacement(logits, seeds, positions, Purpose.DRAFT, count)


@dataclass(frozen=True, kw_only=True)
class Chains:
    """The defaults are the product's chains; each negative control replaces one of them."""

    draw: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = draw_draft
    draft_seeds: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = round_seeds
    # the draft distribution as it is reported to verification
    reported: Callable[[torch.Tensor], torch.Tensor] = lambda q_logits: q_logits
    reported_version: Callable[[torch.Tensor], torch.Tensor] = lambda versions: versions
    truncate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = (
        lambda lengths, drafts, q_logits: lengths
    )
    verify: Callable[..., Verdict | TreeVerdict] = verify_chain

    @property
    def most(self) -> int:
        return DEPTH

    def run(
        self, world: World, round: Round, *, deterministic: bool, impl: str
    ) -> Verdict | TreeVerdict:
        seeds = self.draft_seeds(round.seeds, round.positions)
        contexts, drafts = [round.contexts], []
        for step in range(DEPTH):
            q_logits = world.q_logits[round.versions, contexts[-1]]
            drafts.append(
                q_logits.argmax(dim=-1)
                if deterministic
                else self.draw(q_logits, seeds, round.positions + step)
            )
            contexts.append(world.after(contexts[-1], drafts[-1]))
        visited, drafted = torch.stack(contexts, dim=1), torch.stack(drafts, dim=1)
        q_logits = world.q_logits[self.reported_version(round.versions)[:, None], visited[:, :-1]]
        lengths = self.truncate(round.lengths, drafted, q_logits)
        depths = torch.arange(DEPTH + 1, device=lengths.device)
        p_logits = world.p_logits[depths, visited][depths <= lengths[:, None]]
        q_reported = None if deterministic else self.reported(q_logits)
        return self.verify(
            p_logits, drafted, lengths, q_reported, round.seeds, round.positions, impl=impl
        )


@dataclass(frozen=True, kw_only=True)
class Trees:
    """The same for trees of the shape `TREE`, or of its first nodes."""

    draw: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor] = draw_siblings
    verify: Callable[..., TreeVerdict] = verify_tree

    @property
    def most(self) -> int:
        return len(TREE)

    def run(self, world: World, round: Round, *, deterministic: bool, impl: str) -> TreeVerdict:
        count, seeds = len(round.contexts), round_seeds(round.seeds, round.positions)
        contexts, depths = [round.contexts], [0]
        tokens = torch.full((count, len(TREE)), -1, dtype=torch.int64, device=round.contexts.device)
        q_rows = torch.full(
            (count, len(TREE) + 1), -1, dtype=torch.int64, device=round.contexts.device
        )
        for slot in range(len(TREE) + 1):
            if slot > 0:
                contexts.append(world.after(contexts[TREE[slot - 1] + 1], tokens[:, slot - 1]))
                depths.append(depths[TREE[slot - 1] + 1] + 1)
            children = [node for node, parent in enumerate(TREE) if parent + 1 == slot]
            if children:
                q_rows[:, slot] = round.versions * world.q_logits.shape[1] + contexts[slot]
                q_logits = world.q_logits.flatten(0, 1)[q_rows[:, slot]]
                if deterministic:
                    tokens[:, children] = q_logits.topk(len(children), dim=-1).indices
                else:
                    tokens[:, children] = self.draw(
                        q_logits, seeds, round.positions + depths[slot], len(children)
                    )
        parents = torch.tensor(TREE, device=tokens.device).expand_as(tokens)
        slots = torch.arange(len(TREE) + 1, device=tokens.device)
        seen = slots <= round.lengths[:, None]
        p_logits = world.p_logits[
            torch.tensor(depths, device=tokens.device), torch.stack(contexts, dim=1)
        ][seen]
        distributions = (None, None) if deterministic else (world.q_logits.flatten(0, 1), q_rows)
        tree = DraftTree(tokens, parents, round.lengths)
        return self.verify(p_logits, tree, *distributions, round.seeds, round.positions, impl=impl)


class Generations(NamedTuple):
    cells: torch.Tensor  # [B], the first tokens of each sequence as one number
    num_rounds: int


def generate(
    world: World,
    procedure: Procedure,
    *,
    seeds: torch.Tensor,
    length: int,
    deterministic: bool = False,
    impl: str = "auto",
) -> Generations:
    """`length` tokens of each of the sequences `seeds` [B], by rounds of 0 to `procedure.most`
    drafted tokens."""
    contexts, counts = torch.full_like(seeds, START), torch.zeros_like(seeds)
    rows = torch.arange(len(seeds), device=seeds.device)
    num_rounds = 0
    while len(rows):
        # Ragged on purpose, with swaps between rounds, and decided before anything of the round is
        # drawn.
        lengths = (rows * 5 + counts[rows] * 3 + 2) % (procedure.most + 1)
        versions = (rows // 3 + counts[rows]) % VERSIONS
        round = Round(contexts[rows], lengths, versions, seeds[rows], counts[rows])
        verdict = procedure.run(world, round, deterministic=deterministic, impl=impl)
        for step in range(int(verdict.accepted.max()) + 1):
            emitted = step <= verdict.accepted
            contexts[rows[emitted]] = world.after(
                contexts[rows[emitted]], verdict.tokens[emitted, step]
            )
        counts[rows] += verdict.accepted + 1
        num_rounds += len(rows)
        rows = rows[counts[rows] < length]
    return Generations(world.cells(contexts, counts, length), num_rounds)


@functools.lru_cache(maxsize=32)
def world_of(distribution: Distribution, offset: float) -> World:
    """Tables of a case, which all ways to draft and verify share."""
    device = torch.device("cpu")
    return distribution.world(vocab_size=VOCAB_SIZE, seed=1, device=device, offset=offset)


def joint_fit(
    distribution: Distribution, procedure: Procedure, num_rounds: int, *, offset: float = 0.0
) -> Fit:
    """G-test of the joint distribution of the first `LENGTH` tokens of texts, over at least so many
    rounds."""
    world, counts = world_of(distribution, offset), torch.zeros(VOCAB_SIZE**LENGTH)
    rounds = sequences = 0
    while rounds < num_rounds:
        seeds = torch.arange(sequences, sequences + BATCH)
        deterministic = distribution.deterministic
        made = generate(
            world, procedure, seeds=seeds, length=LENGTH, deterministic=deterministic, impl="torch"
        )
        counts += torch.bincount(made.cells, minlength=len(counts))
        rounds, sequences = rounds + made.num_rounds, sequences + len(seeds)
    return g_test(counts, world.joint_distribution(LENGTH))
