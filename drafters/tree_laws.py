"""The draft's laws at the nodes of a tree, over the draft's ids, and the children chosen or drawn from them, in the target's."""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftsmith.drafters.drawing import adjusted
from draftsmith.drafters.interface import DraftInputs
from draftsmith.kernels.filters import process
from draftsmith.kernels.randomness import Purpose, sample_without_replacement


class Children(NamedTuple):
    """Of n nodes, `count` each, in the order they are to be tested."""

    tokens: torch.Tensor  # [n, count] target ids
    logprobs: torch.Tensor  # [n, count] of the ranking law; -inf where there are not so many


class TreeLaws:
    """R rows of a batch; `rows` are their indices in it."""

    def __init__(self, inputs: DraftInputs, rows: torch.Tensor, *, vocab_size: int, vocab_map: torch.Tensor | None):
        self.inputs, self.rows, self.vocab_size, self.vocab_map = inputs, rows, vocab_size, vocab_map
        self.sampling = inputs.sampling.select(rows)
        self.greedy = self.sampling.temperature == 0
        self.seeds = inputs.seeds[rows]
        self._ranking = self.sampling.ranking()

    @property
    def adjusts(self) -> bool:
        """Whether prefixes are read."""
        return self.inputs.adjust is not None

    def likeliest(self, logits: torch.Tensor, owners: torch.Tensor, prefixes: list[list[int]], count: int) -> Children:
        """Of raw logits [n, Vd] of rows `owners` [n]; `prefixes` are the drafted tokens before each."""
        law = process(self._adjusted(logits, owners, prefixes), self._ranking.select(owners))
        logprobs = torch.log_softmax(law, dim=-1)
        best = torch.where(logprobs.isnan(), -torch.inf, logprobs).topk(min(count, law.shape[1]), dim=-1)
        missing = count - best.values.shape[1]
        tokens = torch.nn.functional.pad(self._target_ids(best.indices), (0, missing))
        return Children(tokens, torch.nn.functional.pad(best.values, (0, missing), value=-torch.inf))

    def draw(
        self, logits: torch.Tensor, owners: torch.Tensor, prefixes: list[list[int]], positions: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(children [n, count], the processed laws [n, V] they were drawn from without replacement, over the target's ids).

        A child that the law has no more token for repeats the first one, which no verification keeps again. A law without mass
        (NaN weights) gives token 0, at -inf.
        """
        law = process(self._adjusted(logits, owners, prefixes), self.sampling.select(owners))
        ids = sample_without_replacement(law, self.seeds[owners], positions, Purpose.DRAFT, count)
        ids = torch.where(ids < 0, ids[:, :1], ids).clamp(min=0)
        return self._target_ids(ids), self._over_target_ids(law)

    def _adjusted(self, logits: torch.Tensor, owners: torch.Tensor, prefixes: list[list[int]]) -> torch.Tensor:
        if self.inputs.adjust is None:
            return logits
        return adjusted(self.inputs.adjust, logits, self.rows[owners], prefixes, self.vocab_size, self.vocab_map)

    def _target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self.vocab_map is None else self.vocab_map[ids]

    def _over_target_ids(self, law: torch.Tensor) -> torch.Tensor:
        if self.vocab_map is None:
            return law
        whole = torch.full((len(law), self.vocab_size), -torch.inf, dtype=law.dtype, device=law.device)
        whole[:, self.vocab_map] = law
        return whole
