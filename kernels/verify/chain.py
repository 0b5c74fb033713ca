"""Chain verification: which drafted tokens stand, and the one token after them, so that the output
distribution is the target's.

Draft token x at a position, drawn from q, is kept when log u + log q(x) < log p(x). The first one
that is not kept is replaced by a draw from the residual max(p - q, 0); when all are kept, one more
token is drawn from p (the bonus). Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023
(arXiv:2302.01318).

A whole round is verified from raw logits: by Triton on a GPU, on a CPU by a compiled kernel whose
filters, tests, residuals and draws are one call.

Legend: B requests, K draft positions, V vocabulary, R = sum(lengths + 1) rows of target logits; D
of the B requests have drafted tokens, and come first.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from draftsmith.kernels.dispatch import operation
from draftsmith.kernels.host_compiler import address_of, function_of
from draftsmith.kernels.sampling.draw import ROWS, SOURCE, rows_of, takes
from draftsmith.kernels.sampling.filters import SamplingRows, clean, process
from draftsmith.kernels.sampling.random_streams import STREAMS, Draws, Purpose
from draftsmith.kernels.verify.residual import (
    accepts,
    assemble,
    drawn_distribution,
    log_distribution,
    one_hot_logits,
    residual_distribution,
    rows_before,
    wide,
)
from draftsmith.kernels.verify.verdict import Drafts, Verdict

UNDECIDED = -1  # in place of the count of a row that was kept


@operation
def verify_chain(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    draws: Draws = STREAMS,
    sizes: torch.Tensor | None = None,
    impl: str = "auto",
) -> Verdict:
    """Keeps a prefix of each row's drafted tokens and draws the next one.

    Args:
        p_logits: [R, V] processed target logits; row b owns `sizes[b] + 1` consecutive ones.
        draft_tokens: [B, K] int64; entries at `lengths[b]` and beyond are not read. A negative one
        is always rejected.
        lengths: [B] int64, 0 <= lengths[b] <= K.
        q_logits: [B, K, V] processed draft logits, the very distribution each token was drawn from;
        None when drafting was
            deterministic (q is one-hot). A deterministic row in a batch with distributions is 0 at
            its token and -inf elsewhere.
        seeds: [B] int64.
        positions: [B] int64, absolute position of each row's first drafted token.
        sizes: [B] int64, at least the lengths, which they are where none are given: drafted tokens
        that the pass had of each row.
        draws: source of random numbers; the reference alone takes another than its own.

    NaN counts as -inf. A token with p(x) = 0 or q(x) = 0 is never kept. A token that its
    distribution could not have drawn (negative, or q(x) = 0) counts as no draft: what replaces it
    is drawn from p. A residual without mass (p = q up to rounding) falls back to p. When the
    deciding row of p is all -inf there is no distribution to draw from and the emitted token is -1.
    Computes in the dtype of the logits, float32 at least.
    """
    num_rows, num_draft = draft_tokens.shape
    device = p_logits.device
    log_p = log_distribution(p_logits)
    first_rows = rows_before(lengths, sizes)
    depths = torch.arange(num_draft, device=device)
    offered = (depths < lengths[:, None]) & (draft_tokens >= 0)
    p_rows = torch.where(offered, first_rows[:, None] + depths, 0)
    ids = torch.where(offered, draft_tokens, 0)
    places = torch.arange(num_rows, device=device)
    log_q = None if q_logits is None else log_distribution(q_logits)
    token_log_q = 0.0 if log_q is None else log_q.gather(-1, ids[..., None])[..., 0]
    log_u = draws.uniform(seeds[:, None], positions[:, None] + depths).log()
    keep = offered & accepts(log_u, log_p[p_rows, ids], torch.as_tensor(token_log_q, device=device))
    accepted = keep.long().cumprod(dim=1).sum(dim=1)
    rejected = accepted < lengths

    final_rows = first_rows + accepted
    final_logits = clean(wide(p_logits[final_rows]))
    if bool(rejected.any()):
        at = places[rejected], accepted[rejected]
        rest_p = log_p[final_rows[rejected]]
        rest_q = (
            one_hot_logits(draft_tokens[at], rest_p)
            if log_q is None
            else drawn_distribution(log_q[at], draft_tokens[at])
        )
        residual = residual_distribution(rest_p, rest_q)
        # A choice of rows, which is several times cheaper than one of numbers.
        kept = residual.amax(dim=-1) > -math.inf
        final_logits[rejected.nonzero()[kept, 0]] = residual[kept]
    purposes = torch.where(rejected, int(Purpose.RESIDUAL), int(Purpose.BONUS))
    emitted = draws.token(final_logits, seeds, positions + accepted, purposes)
    return Verdict(accepted, assemble(draft_tokens, accepted, emitted))


@operation
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
    drafts = no_drafts(logits) if drafts is None else drafts
    own = rows.select(owners(drafts, len(seeds), len(logits)))
    processed = process(logits, own, impl="torch")
    tokens, lengths, q_logits, sizes = drafts.padded(len(seeds))
    verdict = verify_chain(
        processed, tokens, lengths, q_logits, seeds, positions, sizes=sizes, impl="torch"
    )
    return torch.cat([verdict.accepted[:, None], verdict.tokens], dim=1)


def owners(drafts: Drafts, num_requests: int, num_rows: int) -> torch.Tensor:
    """[R] int64, the request that owns each row of logits."""
    counts = torch.nn.functional.pad(drafts.sizes, (0, num_requests - len(drafts.sizes))) + 1
    return torch.repeat_interleave(counts, output_size=num_rows)


def no_drafts(logits: torch.Tensor) -> Drafts:
    none = torch.empty(0, dtype=torch.int64, device=logits.device)
    return Drafts(none.view(0, 0), none, None, none)


def _kernel() -> Any:
    return function_of(SOURCE, "verify_drafts", ROWS + "pppppnnpppnni", result="b")


def verify_logits_compiled(
    logits: torch.Tensor,
    rows: SamplingRows,
    drafts: Drafts | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor | None:
    """As `verify_logits`: requests on which a rounding of torch's might decide, or of which a row
    has no mass, are torch's. None where all are, and where there is no compiler."""
    verdicts, num_rows = compiled_verdicts(logits, rows, drafts, None, seeds, positions), len(seeds)
    if verdicts is None or UNDECIDED not in verdicts[:, 0].tolist():
        return verdicts
    left = (verdicts[:, 0] == UNDECIDED).nonzero()[:, 0]
    if len(left) == num_rows:
        return None
    mine = torch.isin(owners(drafts or no_drafts(logits), num_rows, len(logits)), left)
    of_left = None if drafts is None else drafts.select(left[left < len(drafts.tokens)])
    own = logits[mine], rows.select(left), of_left, seeds[left], positions[left]
    verdicts[left] = verify_logits(*own, impl="torch")
    return verdicts


def compiled_verdicts(
    logits: torch.Tensor,
    rows: SamplingRows,
    drafts: Drafts | None,
    parents: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor | None:
    """[B, K + 2] as `verify_logits`, of trees with `parents` [D, K] [B, 2 K + 2]: then the nodes
    kept. A row that torch has to decide begins with `UNDECIDED`; None without a compiler."""
    kernel = _kernel() if takes(logits) else None
    if kernel is None:
        return None
    num_drafting = num_draft = 0
    tokens = lengths = q_logits = sizes = None
    if drafts is not None:
        if not (drafts.logits is None or takes(drafts.logits)):
            return None
        given = [None if part is None else part.contiguous() for part in drafts]
        tokens, lengths, q_logits, sizes = map(address_of, given)
        num_drafting, num_draft = drafts.tokens.shape
    num_rows, columns = len(seeds), num_draft + 2
    if parents is not None:
        parents, columns = parents.contiguous(), columns + num_draft
    verdicts = torch.empty(num_rows, columns, dtype=torch.int64)
    seeds, positions = seeds.contiguous(), positions.contiguous()
    kernel(
        *rows_of(logits, rows), tokens, lengths, sizes, q_logits, address_of(parents),
        num_drafting, num_draft, seeds.data_ptr(), positions.data_ptr(), verdicts.data_ptr(),
        num_rows, logits.shape[-1], torch.get_num_threads(),
    )  # fmt: skip
    return verdicts
