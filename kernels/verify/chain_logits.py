"""Chain verification of a whole round, from raw logits: by Triton on a GPU, compiled on a CPU.

Legend as in `chain.py`; D of the B requests have drafted tokens, and come first.
"""

from __future__ import annotations

import torch

from draftsmith.kernels.dispatch import choose
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.verify.chain import verify_chain_torch
from draftsmith.kernels.verify.chain_compiled import verify_logits_compiled
from draftsmith.kernels.verify.verdict import Drafts


def verify_logits(
    logits: torch.Tensor,
    rows: SamplingRows,
    drafts: Drafts | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """[B, K + 2] int64: how many drafted tokens of each request were kept, then the tokens as in
    `Verdict`.

    Args:
        logits: [R, V] raw target logits; request b owns `drafts.sizes[b] + 1` of them, one without
            drafts a single one.
        rows: distributions of the B requests.
        drafts: of the first D of them.
        seeds, positions: [B] int64, as `verify_chain` takes them.
    """
    if choose(impl, logits.device, logits.dtype) == "triton":
        return _verify_triton(logits, rows, drafts, seeds, positions)
    found = None
    if impl == "auto":
        found = verify_logits_compiled(logits, rows, drafts, seeds, positions)
    return verify_logits_torch(logits, rows, drafts, seeds, positions) if found is None else found


def _verify_triton(
    logits: torch.Tensor,
    rows: SamplingRows,
    drafts: Drafts | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    from draftsmith.kernels.verify.chain_triton import verify_logits_triton

    drafts = no_drafts(logits) if drafts is None else drafts
    temperatures = rows.temperature
    if rows.passes.filtered:
        # What is filtered is made first; the rest is left to the launch.
        logits = process(logits, rows.select(owners(drafts, len(seeds), len(logits))))
        temperatures = torch.ones_like(temperatures)
    return verify_logits_triton(logits, temperatures, drafts, seeds, positions)


def verify_logits_torch(
    logits: torch.Tensor,
    rows: SamplingRows,
    drafts: Drafts | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The reference."""
    drafts = no_drafts(logits) if drafts is None else drafts
    processed = process(logits, rows.select(owners(drafts, len(seeds), len(logits))))
    tokens, lengths, q_logits, sizes = drafts.padded(len(seeds))
    verdict = verify_chain_torch(
        processed, tokens, lengths, q_logits, seeds, positions, sizes=sizes
    )
    return torch.cat([verdict.accepted[:, None], verdict.tokens], dim=1)


def owners(drafts: Drafts, num_requests: int, num_rows: int) -> torch.Tensor:
    """[R] int64, the request that owns each row of logits."""
    counts = torch.nn.functional.pad(drafts.sizes, (0, num_requests - len(drafts.sizes))) + 1
    return torch.repeat_interleave(counts, output_size=num_rows)


def no_drafts(logits: torch.Tensor) -> Drafts:
    none = torch.empty(0, dtype=torch.int64, device=logits.device)
    return Drafts(none.view(0, 0), none, None, none)
