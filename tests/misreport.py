"""Drafts that are wrong on purpose: verification is given another q than they were drawn from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from draftsmith.drafters.interface import Proposal, ServingDrafter


def misreporting(
    drafter: ServingDrafter, depth: int, vocab_size: int, *, factor: float = 3.0
) -> ServingDrafter:
    """The drafter, whose q is `factor` times too sharp from drafted token `depth` on."""
    wrong = Misreport(depth, factor)
    for name in ("propose", "propose_tree"):
        made = getattr(drafter, name, None)
        if made is not None:
            told = lambda *given, made=made: wrong.apply(made(*given), vocab_size)  # noqa: E731
            setattr(drafter, name, told)
    return drafter


@dataclass(frozen=True)
class Misreport:
    depth: int  # the first drafted token of a round, counted from 1, whose q is wrong
    factor: float  # above 1: its logits are given as so many times what they were

    def apply(self, proposal: Proposal, vocab_size: int) -> Proposal:
        """The same drafts with a wrong q. Drafts of a chain that were not drawn get q = 1 / factor
        where 1 would be right; trees that were not drawn stay as they are, for their verification
        reads no q."""
        if proposal.parents is not None:
            return self._tree(proposal)
        logits = (
            one_hot(proposal.tokens, vocab_size) if proposal.logits is None else proposal.logits
        )
        wrong = logits.clone()
        wrong[:, self.depth - 1 :] = self._sharper(logits[:, self.depth - 1 :])
        return replace(proposal, logits=wrong)

    def _tree(self, proposal: Proposal) -> Proposal:
        if proposal.logits is None or proposal.q_rows is None or proposal.parents is None:
            return proposal
        rows = proposal.q_rows[slot_depths(proposal.parents) >= self.depth - 1]
        rows = rows[rows >= 0].unique()
        wrong = proposal.logits.clone()
        wrong[rows] = self._sharper(proposal.logits[rows])
        return replace(proposal, logits=wrong)

    def _sharper(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., V]. A distribution of one token, which has no sharper one, loses 1 - 1 /
        factor to all others."""
        possible = torch.isfinite(logits)
        alone = possible.sum(dim=-1, keepdim=True) == 1
        others = math.log((1 - 1 / self.factor) / (logits.shape[-1] - 1))
        flat = torch.where(possible, -math.log(self.factor), others)
        return torch.where(alone, flat, logits * self.factor)


def one_hot(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits [B, K, V] of drafts [B, K] that were not drawn; -1, which is no token, counts as token
    0."""
    logits = torch.full((*tokens.shape, vocab_size), -math.inf, device=tokens.device)
    return logits.scatter(-1, tokens.clamp(min=0)[..., None], 0.0)


def slot_depths(parents: torch.Tensor) -> torch.Tensor:
    """Depths [B, K + 1] of the root (0) and of each node, for parents [B, K] in which a parent
    comes before its children."""
    depths = torch.zeros(
        len(parents), parents.shape[1] + 1, dtype=torch.int64, device=parents.device
    )
    for node in range(parents.shape[1]):
        depths[:, node + 1] = (
            depths.gather(1, (parents[:, node : node + 1] + 1).clamp(min=0))[:, 0] + 1
        )
    return depths
