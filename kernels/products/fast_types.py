"""Types that this processor multiplies faster than float32, by the times of some products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import linear

from draftsmith.kernels.measured import CHOICES, Choices, Way
from draftsmith.kernels.products.few_rows import MOST_ROWS, SOURCE, few_rows
from draftsmith.kernels.products.narrow_products import NARROW, widened, widens

# Products of a pass of a target whose weights are laid out for few rows, of one whose weights are
# torch's, and of a training step.
Use = Literal["laid out", "plain", "step"]
WIDTH, NUM_WEIGHTS = 1024, 16  # 64 MiB in float32, more than caches hold
# Rows of a product, and how many of them: answers alone, verifications, a prompt. Of about the same
# time in float32.
MIX = ((1, 16), (8, 4), (96, 1))
STEP_ROWS = 64


class Speed(NamedTuple):
    """`times`: how many times float32's, 0 where nothing was timed."""

    is_faster: bool
    times: float


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def speed_of(dtype: torch.dtype, use: Use, choices: Choices = CHOICES) -> Speed:
    """Speed of products on this CPU in a type narrower than float32; others are not faster."""
    if dtype not in NARROW:
        return Speed(False, 0.0)
    kind, name = f"type of {use} products", name_of(dtype)
    make = _step if use == "step" else partial(_pass, laid_out=use == "laid out")
    names = {"float32": torch.float32, name: dtype}

    def ways() -> Mapping[str, Way]:
        return {one: make(of) for one, of in names.items()}

    made = choices.choice(kind, (dtype,), tuple(names), ways, sources=[SOURCE])
    if made is None:
        return Speed(False, 0.0)
    return Speed(made.way == name, made.seconds["float32"] / made.seconds[name])


def _pass(dtype: torch.dtype, *, laid_out: bool) -> Way:
    weights = [_full(WIDTH, dtype) for _ in range(NUM_WEIGHTS)]
    products = [_product(weight, laid_out=laid_out) for weight in weights]

    def work() -> None:
        for count, number in MIX:
            rows = _full(count, dtype)
            for index in range(number):
                products[index % NUM_WEIGHTS](rows)

    return work


def _product(weight: torch.Tensor, *, laid_out: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    few = few_rows(weight, None) if laid_out else None
    many = widened if laid_out and widens(weight.dtype) else linear
    return lambda rows: (
        few(rows) if few is not None and len(rows) <= MOST_ROWS else many(rows, weight)
    )


def _step(dtype: torch.dtype) -> Way:
    """Forward and backward over float32 weights, as autocast computes them."""
    rows, weight = _full(STEP_ROWS, torch.float32), _full(WIDTH, torch.float32)

    def work() -> None:
        states, narrow = rows.to(dtype), weight.to(dtype)
        grad = torch.mm(states, narrow.T)
        torch.mm(grad, narrow)
        torch.mm(grad.T, states)

    return work


def _full(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count, WIDTH), 0.5, dtype=dtype)
