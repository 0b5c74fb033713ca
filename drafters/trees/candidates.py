"""The draft's distributions at the nodes of a tree, over the draft's ids, and the children chosen
or drawn from them, in the target's.

Everything has the shape of the level, whatever its nodes are, so that no size has to be read back
from a device. Legend: R rows, W nodes of a level, Vd draft vocabulary, V the target's.

Trees of given choices come from heads that draft every depth by itself (Medusa): nothing is drawn,
so a node is kept with the target's own chance of its token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.autoregressive.draft_sampler import adjusted
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.tree_shape import FixedTree
from draftsmith.drafters.trees.nodes import TreeNodes
from draftsmith.kernels.sampling.draw import draw_several
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose
from draftsmith.kernels.sampling.vocabulary import check_sampled_head, scatter_to_target_vocab


class Parents(NamedTuple):
    """Nodes of a level whose children are to be found."""

    logits: torch.Tensor  # [R, W, Vd] raw
    nodes: TreeNodes
    at: torch.Tensor  # [R, W] where they are among `nodes`, -1 for the root
    alive: torch.Tensor  # [R, W] bool; results of the others are arbitrary
    depth: int  # drafted tokens up to them, their own included


class Children(NamedTuple):
    """`count` of each node, in the order they are to be tested."""

    tokens: torch.Tensor  # [R, W, count] target ids
    # [R, W, count] of the ranking distribution; -inf where there are not so many
    logprobs: torch.Tensor


class TreeDistributions:
    """`rows` [R] are the rows' indices in the batch."""

    def __init__(
        self,
        inputs: DraftInputs,
        rows: torch.Tensor,
        *,
        vocab_size: int,
        vocab_map: torch.Tensor | None,
    ):
        self.inputs, self.rows, self.vocab_size, self.vocab_map = (
            inputs,
            rows,
            vocab_size,
            vocab_map,
        )
        self.sampling = inputs.sampling.select(rows)
        self.greedy = self.sampling.temperature == 0
        self.seeds = inputs.seeds[rows]
        self._ranking = self.sampling.ranking()

    def likeliest(self, parents: Parents, count: int) -> Children:
        distribution = self._distribution(parents, self._ranking)
        logprobs = torch.log_softmax(distribution, dim=-1)
        best = torch.where(logprobs.isnan(), -torch.inf, logprobs).topk(
            min(count, distribution.shape[1]), dim=-1
        )
        missing = count - best.values.shape[1]
        tokens = torch.nn.functional.pad(self._target_ids(best.indices), (0, missing))
        values = torch.nn.functional.pad(best.values, (0, missing), value=-torch.inf)
        shape = parents.at.shape
        return Children(tokens.unflatten(0, shape), values.unflatten(0, shape))

    def draw(
        self, parents: Parents, positions: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(children [R, W, count] at `positions` [R], the processed distributions [R * W, V] they
        were drawn from without replacement, over the target's ids).

        A child that the distribution has no more token for repeats the first one, which no
        verification keeps again. A distribution without mass (NaN weights) gives token 0, at -inf.
        """
        width = parents.at.shape[1]
        distribution = self._distribution(parents, self.sampling)
        check_sampled_head(distribution, self.vocab_map, self.vocab_size)
        seeds, positions = self.seeds.repeat_interleave(width), positions.repeat_interleave(width)
        ids = draw_several(distribution, seeds, positions, Purpose.DRAFT, count)
        ids = torch.where(ids < 0, ids[:, :1], ids).clamp(min=0)
        tokens = self._target_ids(ids).unflatten(0, parents.at.shape)
        return tokens, scatter_to_target_vocab(distribution, self.vocab_map, self.vocab_size)

    def _distribution(self, parents: Parents, sampling: SamplingRows) -> torch.Tensor:
        """[R * W, Vd] processed."""
        num_rows, width = parents.at.shape
        owners = torch.arange(num_rows, device=parents.at.device).repeat_interleave(width)
        logits = parents.logits.flatten(0, 1)
        if self.inputs.adjust is not None:
            # Where the host works masks out, the tokens of a node that is not alive are not for it.
            prefixes = parents.nodes.prefixes(parents.at, parents.depth).flatten(0, 1)
            prefixes = prefixes.masked_fill(~parents.alive.flatten()[:, None], -1)
            rows = self.rows[owners]
            logits = adjusted(
                self.inputs.adjust, logits, rows, prefixes, self.vocab_size, self.vocab_map
            )
        return process(logits, sampling if width == 1 else sampling.select(owners))

    def _target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self.vocab_map is None else self.vocab_map[ids]


class FixedLevel(NamedTuple):
    """Nodes of one depth, on the host or on a device; levels are numbered through."""

    owners: Any  # nodes whose children are chosen apart, -1: the root
    slots: Any  # [C] index of each child's among them
    parents: Any  # [C] -1: the root
    ranks: Any  # [C] among the likeliest tokens of the depth
    places: Any  # [C] among the choices, best first


class FixedLevels(NamedTuple):
    levels: list[FixedLevel]  # of lists
    widths: list[int]  # likeliest tokens needed of each depth
    num_nodes: int

    @classmethod
    def of(cls, shape: FixedTree, max_depth: int, *, apart: bool) -> FixedLevels:
        """Levels of the tree down to `max_depth`. Drafts of a depth do not depend on those above it
        unless they are kept `apart`, for penalties and masks of a request."""
        numbers: dict[tuple[int, ...], int] = {(): -1}
        levels = []
        for depth in range(1, min(shape.depth, max_depth) + 1):
            level = FixedLevel([], [], [], [], [])
            for place, path in enumerate(shape.choices):
                if len(path) == depth:
                    numbers[path] = len(numbers) - 1
                    level.parents.append(numbers[path[:-1]])
                    level.ranks.append(path[-1])
                    level.places.append(-place)
            level.owners.extend(sorted({*level.parents}) if apart else [-1])
            level.slots.extend(level.owners.index(one) if apart else 0 for one in level.parents)
            levels.append(level)
        return cls(levels, [1 + max(level.ranks) for level in levels], len(numbers) - 1)

    def columns(self) -> list[list[int]]:
        return [column for level in self.levels for column in level]

    def on_device(self, parts: Sequence[torch.Tensor]) -> FixedLevels:
        """The same with tensors for lists; `parts` are the `columns`, on the device."""
        size = len(FixedLevel._fields)
        starts = range(0, len(parts), size)
        return self._replace(levels=[FixedLevel(*parts[at : at + size]) for at in starts])


def choose_fixed(
    distributions: TreeDistributions,
    logits_at: Callable[[int], torch.Tensor],
    tree: FixedLevels,
    budgets: torch.Tensor,
    most: int,
) -> Proposal:
    """Propose a tree on the device for the rows of `distributions`, no more than its first choices.

    Args:
        logits_at: raw draft logits [R, V] of a depth.
        budgets: [R] nodes of each row, `most` at most.
    """
    device, size = budgets.device, len(budgets)
    nodes = TreeNodes(size, device)
    has_mass = torch.ones(size, dtype=torch.bool, device=device)
    for depth, (level, width) in enumerate(zip(tree.levels, tree.widths, strict=True)):
        at = level.owners.expand(size, -1)
        logits = logits_at(depth)[:, None].expand(-1, at.shape[1], -1)
        children = distributions.likeliest(
            Parents(logits, nodes, at, torch.ones_like(at, dtype=torch.bool), depth), width
        )
        has_mass &= (children.logprobs[..., 0] > -torch.inf).all(dim=1)
        chosen = children.tokens[:, level.slots, level.ranks]
        parents, ranks = (one.expand(size, -1) for one in (level.parents, level.places))
        nodes.add(chosen, parents, ranks.float())
    kept = nodes.best(budgets.clamp(max=most), most)
    q_rows = torch.full((size, kept.count + 1), -1, dtype=torch.int64, device=device)
    return kept.proposal(distributions.inputs, distributions.rows, None, q_rows, has_mass)
