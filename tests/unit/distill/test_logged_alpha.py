"""alpha by logged laws alone: exact where a filter cuts inside what is logged, bounded elsewhere, silent where it must be."""

from __future__ import annotations

import pytest
import torch

from draftsmith.distill.logged_alpha import MOST_OPEN, logged_alpha
from draftsmith.distill.logged_law import Logged
from draftsmith.kernels.acceptance import overlap
from draftsmith.kernels.filters import SamplingRows, process
from draftsmith.kernels.laws import top_law
from draftsmith.serve.record import Law, RoundRecord

VOCAB = 300


def record(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> RoundRecord:
    law = top_law(logits[None], 64)
    norm = 0.0 if temperature in (0.0, 1.0) else float(torch.logsumexp(logits.log_softmax(-1) / temperature, 0))
    return RoundRecord(
        request="r", round=0, request_class="", target="t", target_revision="", draft_version="1", time_s=0.0,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, position=1, context=[1], drafted=[1], accepted=0,
        committed=[1], emitted=1, p=[Law(law.ids[0].tolist(), law.logprobs[0].tolist(), float(law.tail), norm)],
    )  # fmt: skip


def both(sharpness: float, *sampling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha of 40 laws from the whole of p, and from the logs."""
    generator = torch.Generator().manual_seed(0)
    p = sharpness * torch.randn(40, VOCAB, generator=generator)
    q = p + torch.randn(40, VOCAB, generator=generator)
    temperature, top_k, top_p, min_p = sampling
    rows = SamplingRows.of([temperature] * 40, top_k=[int(top_k)] * 40, top_p=[top_p] * 40, min_p=[min_p] * 40)
    q_logits = process(q, rows)
    records = [Logged(record(one, temperature, int(top_k), top_p, min_p), 0) for one in p]
    return overlap(process(p, rows), q_logits), logged_alpha(records, q_logits)


@pytest.mark.parametrize(
    "sampling",
    [(0.0, 0, 1.0, 0.0), (1.0, 20, 1.0, 0.0), (0.7, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2), (0.8, 40, 0.9, 0.05), (1.3, 10, 0.5, 0.0)],
)
def test_filtered_laws_are_told_exactly(sampling: tuple[float, ...]) -> None:
    whole, logged = both(3.0, *sampling)
    assert not logged.isnan().any()
    torch.testing.assert_close(logged.float(), whole.float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("sampling", [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.0, 100, 1.0, 0.0)])
def test_sharp_laws_are_told_within_their_bounds(sampling: tuple[float, ...]) -> None:
    whole, logged = both(6.0, *sampling)
    told = ~logged.isnan()
    assert told.float().mean() > 0.8
    # Half of what may be open, and float32.
    assert float((logged - whole)[told].abs().max()) <= MOST_OPEN / 2 + 1e-4


def test_flat_laws_say_nothing() -> None:
    _, logged = both(0.5, 1.0, 0, 1.0, 0.0)
    assert logged.isnan().all()
    _, nucleus = both(0.5, 1.0, 0, 0.95, 0.0)
    assert nucleus.isnan().all()
    assert logged_alpha([], torch.zeros(0, VOCAB)).shape == (0,)
