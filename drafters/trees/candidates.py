"""The draft's distributions at the nodes of a tree, over the draft's ids, and the children chosen
or drawn from them, in the target's.

Everything has the shape of the level, whatever its nodes are, so that no size has to be read back
from a device. Legend: R rows, W nodes of a level, Vd draft vocabulary, V the target's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftsmith.drafters.autoregressive.draft_sampler import adjusted
from draftsmith.drafters.interface import DraftInputs
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
