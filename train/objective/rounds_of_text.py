"""Rounds expected on teacher-forced text, from its keep probabilities.

A round whose first draft is at position a drafts the token at a + s at depth s. B rows of L tokens,
S depths.
"""

from __future__ import annotations

import torch

from draftsmith.kernels.overlap import expected_rounds


def answers(keep: torch.Tensor, loss_mask: torch.Tensor) -> list[torch.Tensor]:
    """One [n, S] matrix for each stretch of n tokens that the target wrote, as `expected_rounds`
    takes it.

    `keep[j, s]` [L, S] is for the token at position j drafted at depth s. Entry [i, s] of the
    answer that begins at j0 is `keep[j0 + i + s, s]`: the round that decides its token i drafts the
    token at i + s at depth s. 0 past the answer's end.
    """
    return [align_to_round(keep[begin:end]) for begin, end in stretches(loss_mask)]


def stretches(loss_mask: torch.Tensor) -> list[tuple[int, int]]:
    """[begin, end) of each run of True in `loss_mask` [L]."""
    padded = torch.nn.functional.pad(loss_mask.int().cpu(), (1, 1))
    edges = padded.diff()
    begins = (edges == 1).nonzero()[:, 0].tolist()
    ends = (edges == -1).nonzero()[:, 0].tolist()
    return list(zip(begins, ends, strict=True))


def align_to_round(values: torch.Tensor) -> torch.Tensor:
    """[..., L, S] by the position of the drafted token -> by the round's first: [i, s] of it is [i
    + s, s], 0 past the end."""
    size, depths = values.shape[-2:]
    padded = torch.nn.functional.pad(values, (0, 0, 0, depths))
    return torch.stack(
        [padded[..., depth : depth + size, depth] for depth in range(depths)], dim=-1
    )


def deepen(keep: torch.Tensor, depths: int) -> torch.Tensor:
    """[..., S] -> [..., depths]. A drafter whose unroll ends early drafts alike at every later
    depth (a language model)."""
    missing = depths - keep.shape[-1]
    if missing <= 0:
        return keep[..., :depths]
    return torch.cat([keep, keep[..., -1:].expand(*keep.shape[:-1], missing)], dim=-1)


def predicted_tau(keep: torch.Tensor, loss_mask: torch.Tensor) -> float | None:
    """Tokens per round over a batch: keep [B, L, S], loss_mask [B, L]. None when the target wrote
    nothing."""
    tokens, rounds = 0, 0.0
    for row, mask in zip(keep.float().cpu(), loss_mask.cpu(), strict=True):
        for answer in answers(row, mask):
            tokens += len(answer)
            rounds += expected_rounds(answer)
    return tokens / rounds if rounds else None
