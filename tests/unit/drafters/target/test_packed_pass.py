"""Attention of packed texts beside a dense mask, and its memory."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.target.packed_pass import PackedPass, begins_of
from draftsmith.kernels.attention.pool import Scoring
from tests.peak_memory import memory_of

SEGMENTS = torch.tensor([[0] * 290 + [1] * 3 + [2] * 100 + [-1] * 7, [0] * 20 + [1] * 380])
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)


def states(length: int, dtype: torch.dtype, rows: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(rows, heads, length, 8, generator=generator, dtype=dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize("window", [None, 1, 60, 129, 300, 1000])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_values_and_gradients_are_those_of_a_dense_mask(
    sinks: torch.Tensor | None, softcap: float | None, window: int | None
) -> None:
    made = states(SEGMENTS.shape[1], torch.float64)
    columns = torch.arange(SEGMENTS.shape[1])
    back = columns[:, None] - columns
    mask = (back >= 0) & (back < (window or len(columns)))
    mask = mask & (columns >= begins_of(SEGMENTS)[..., None])
    found = PackedPass(SEGMENTS).attend(0, *made, Scoring(0.4, window, softcap, sinks))
    expected = dense(*made, mask[:, None], softcap, sinks)
    texts = (SEGMENTS >= 0)[..., None, None]
    # Soft caps and sinks are weighed in float32.
    near = {} if softcap is None and sinks is None else {"atol": 1e-5, "rtol": 1e-5}
    for one in ("values", "gradients"):
        sides = [
            torch.where(texts, side, 0.0) if one == "values" else gradients(side, made, texts)
            for side in (found, expected)
        ]
        torch.testing.assert_close(*sides, **near)


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = 0.4 * query @ key.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def gradients(
    output: torch.Tensor, made: list[torch.Tensor], texts: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).double()
    return torch.autograd.grad((output * noise * texts).sum(), made)


@pytest.mark.parametrize(("window", "softcap"), [(100, None), (100, 5.0), (None, 5.0)])
def test_no_mask_grows_with_the_square_of_the_length(
    window: int | None, softcap: float | None
) -> None:
    def largest(length: int) -> int:
        made, context = states(length, torch.float32, 1), PackedPass(torch.zeros(1, length).long())
        with torch.no_grad():
            return memory_of(
                lambda: context.attend(0, *made, Scoring(0.4, window, softcap))
            ).largest

    assert largest(4096) <= 2 * largest(2048)
