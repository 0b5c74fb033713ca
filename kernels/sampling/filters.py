"""The sampling distribution of a request: temperature, then top-k, top-p and min-p, in
transformers' order (sequential).

Sequential means that each filter sees the distribution the filter before it left, renormalised. N
rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftsmith.errors import UserError
from draftsmith.kernels.constants import MIN_TEMPERATURE
from draftsmith.kernels.dispatch import operation, reads_freely, sent_tensor

# Nearly always enough tokens to reach top-p, and far cheaper to find than an order of the whole
# vocabulary.
HEAD = 512


class Passes(NamedTuple):
    """Passes over its logits that a batch needs, decided on the host, so that nothing has to be
    read back from a device.

    More than needed is harmless.
    """

    greedy: bool  # some row
    all_greedy: bool
    tempered: bool
    top_k: int  # the largest; 0 when no row has one
    top_p: bool
    min_p: bool

    @classmethod
    def of(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
    ) -> Passes:
        sampled = [row for row, value in enumerate(temperature) if value != 0]
        return cls(
            greedy=len(sampled) < len(temperature),
            all_greedy=not sampled,
            tempered=any(temperature[row] != 1 for row in sampled),
            top_k=max((top_k[row] for row in sampled), default=0),
            top_p=any(top_p[row] < 1 for row in sampled),
            min_p=any(min_p[row] > 0 for row in sampled),
        )

    @property
    def filtered(self) -> bool:
        """True where some row may have a filter."""
        return self.top_k > 0 or self.top_p or self.min_p


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of N rows, made by `of`. `temperature` 0 is greedy; `top_k` 0, `top_p` 1
    and `min_p` 0 switch their filter off."""

    temperature: torch.Tensor  # [N] float32
    top_k: torch.Tensor  # [N] int64
    top_p: torch.Tensor  # [N] float64: 1 - top_p must round as it does for a Python number
    min_p: torch.Tensor  # [N] float32
    passes: Passes
    # [N] on the host, temperature 0; None where the device chose the rows
    greedy_rows: tuple[bool, ...] | None = None

    @classmethod
    def of(
        cls,
        temperature: Sequence[float],
        *,
        top_k: Sequence[int] | None = None,
        top_p: Sequence[float] | None = None,
        min_p: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """Build from one Python value per row; a filter left out is off. A value outside its range
        raises a `UserError`."""
        num_rows = len(temperature)
        top_k = [0] * num_rows if top_k is None else top_k
        top_p = [1.0] * num_rows if top_p is None else top_p
        min_p = [0.0] * num_rows if min_p is None else min_p
        for value in temperature:
            if not (value == 0 or MIN_TEMPERATURE <= value < math.inf):
                raise UserError(
                    f"temperature is {value}; it must be 0 (greedy) or at least {MIN_TEMPERATURE}"
                )
        _check("top_k", top_k, 0, math.inf)
        _check("top_p", top_p, 0, 1)
        _check("min_p", min_p, 0, 1)
        passes = Passes.of(temperature, top_k, top_p, min_p)
        # As float64, which holds all of them, so that one copy is enough.
        columns = torch.tensor([temperature, top_k, top_p, min_p], dtype=torch.float64)
        sent = sent_tensor(torch.device(device), columns)
        options = (sent[0].float(), sent[1].long(), sent[2], sent[3].float())
        return cls(*options, passes, tuple(value == 0 for value in temperature))

    def select(self, rows: torch.Tensor | slice) -> SamplingRows:
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.passes,
        )

    def room(self, num_rows: int) -> SamplingRows:
        """Memory for parameters of so many rows, all greedy."""
        given = self.temperature.new_zeros(num_rows), self.top_k.new_zeros(num_rows)
        more = self.top_p.new_ones(num_rows), self.min_p.new_zeros(num_rows)
        return SamplingRows(*given, *more, self.passes)

    def take(self, rows: SamplingRows) -> None:
        """Copy the parameters of `rows` into the first ones; nothing where all are greedy."""
        if not rows.passes.all_greedy:
            for mine, theirs in zip(self.options, rows.options):
                mine[: len(theirs)].copy_(theirs)

    @property
    def options(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the Triton kernels take them."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    def ranking(self) -> SamplingRows:
        """The distributions that order tokens by how likely they are: a greedy row has no
        second choices, and is taken at temperature 1 and unfiltered."""
        greedy = self.temperature == 0
        return SamplingRows(
            torch.where(greedy, 1.0, self.temperature),
            torch.where(greedy, 0, self.top_k),
            torch.where(greedy, 1.0, self.top_p),
            torch.where(greedy, 0.0, self.min_p),
            self.passes._replace(greedy=False, all_greedy=False),
        )


def _check(name: str, values: Sequence[float], low: float, high: float) -> None:
    for value in values:
        if not low <= value <= high:
            raise UserError(f"{name} is {value}; it must be between {low} and {high}")


@operation
def process(logits: torch.Tensor, rows: SamplingRows, *, impl: str = "auto") -> torch.Tensor:
    """Raw logits [N, V] -> processed float32 logits [N, V], a new tensor: divided by temperature,
    filtered tokens at -inf.

    A greedy row becomes 0 at its argmax (the lowest id on a tie) and -inf elsewhere. NaN counts as
    -inf, +inf as the largest float. Every filter keeps one of the likeliest tokens, so a row is all
    -inf only when its input is.
    """
    processed = clean(logits.float())
    passes, greedy = rows.passes, rows.temperature == 0
    if passes.all_greedy:
        return greedy_logits(processed)
    source = processed
    if passes.tempered:
        processed = processed / torch.where(greedy, 1.0, rows.temperature)[:, None]
        processed = processed.clamp(max=torch.finfo(torch.float32).max)
    if passes.top_k:
        most = passes.top_k
        processed = _filter(
            lambda part, counts: keep_top_k(part, counts, most),
            processed,
            rows.top_k,
            (rows.top_k > 0) & ~greedy,
        )
    if passes.top_p:
        processed = _filter(keep_top_p, processed, rows.top_p, (rows.top_p < 1) & ~greedy)
    if passes.min_p:
        processed = _filter(keep_min_p, processed, rows.min_p, (rows.min_p > 0) & ~greedy)
    if passes.greedy:
        return _with_greedy_rows(processed, source, greedy)
    return processed


def _with_greedy_rows(
    processed: torch.Tensor, source: torch.Tensor, greedy: torch.Tensor
) -> torch.Tensor:
    """`processed`, whose `greedy` [N] rows are made of `source`, which no filter has changed."""
    if not reads_freely(processed.device):
        return torch.where(greedy[:, None], greedy_logits(source), processed)
    processed[greedy] = greedy_logits(source[greedy])
    return processed


def clean(logits: torch.Tensor) -> torch.Tensor:
    """A copy with NaN as -inf and +inf as the largest float."""
    return torch.nan_to_num(
        logits, nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf
    )


def greedy_logits(logits: torch.Tensor) -> torch.Tensor:
    """[N, V] without NaN -> 0 at the argmax (lowest id on a tie), -inf elsewhere; an all -inf row
    stays so."""
    best, chosen = logits.max(dim=-1, keepdim=True)  # torch promises the first of several maxima
    one_hot = torch.full_like(logits, -math.inf)
    return one_hot.scatter_(-1, chosen, torch.where(best == -math.inf, best, 0.0))


def keep_top_k(logits: torch.Tensor, top_k: torch.Tensor, most: int) -> torch.Tensor:
    """Keeps the `top_k` [N] likeliest tokens of a row, `most` at most, and all that tie with the
    last of them."""
    most = min(most, logits.shape[-1])
    largest = torch.topk(logits, most, dim=-1).values
    return logits.masked_fill(
        logits < largest.gather(-1, top_k.clamp(1, most)[:, None] - 1), -math.inf
    )


def keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the smallest set of likeliest tokens of a row whose probabilities reach `top_p` [N]; at
    least one."""
    # To see whether the head was enough means to wait for the result: on an accelerator everything
    # is ordered.
    if logits.shape[-1] <= HEAD or not reads_freely(logits.device):
        return _top_p_by_order(logits, top_p)
    kept, unsettled = _top_p_by_head(logits, top_p)
    if bool(unsettled.any()):
        kept[unsettled] = _top_p_by_order(logits[unsettled], top_p[unsettled])
    return kept


def _top_p_by_order(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ascending, order = torch.sort(logits, dim=-1, stable=True)
    removed = (
        ascending.softmax(dim=-1).cumsum(dim=-1) <= (1 - top_p.double()).to(logits.dtype)[:, None]
    )
    removed[:, -1] = False
    return logits.masked_fill(removed.scatter(-1, order, removed), -math.inf)


def _top_p_by_head(logits: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the `HEAD` likeliest tokens: (filtered [N, V], rows [N] whose set may be larger
    or ends within a tie)."""
    head = torch.topk(logits, HEAD, dim=-1).values
    # exp(x - logsumexp) of the head only; logsumexp itself is many slow passes on a CPU,
    # log_softmax one.
    normaliser = head[:, :1] - torch.log_softmax(logits, dim=-1).amax(dim=-1, keepdim=True)
    reach = torch.exp(head - normaliser).double().cumsum(dim=-1)
    counts = (reach < top_p.double()[:, None]).sum(dim=-1, keepdim=True) + 1
    last = head.gather(-1, (counts - 1).clamp(max=HEAD - 1))
    following = head.gather(-1, counts.clamp(max=HEAD - 1))
    unsettled = (counts >= HEAD) | (last == following)
    return logits.masked_fill(logits < last, -math.inf), unsettled[:, 0]


def keep_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keeps the tokens at least `min_p` [N] times as likely as the likeliest of their row."""
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(
        probs < min_p.to(probs.dtype)[:, None] * probs.amax(dim=-1, keepdim=True), -math.inf
    )


def _filter(
    keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    logits: torch.Tensor,
    values: torch.Tensor,
    wanted: torch.Tensor,
) -> torch.Tensor:
    """Applies `keep` to the rows of `wanted` [N] bool only."""
    if not reads_freely(logits.device):
        return torch.where(wanted[:, None], keep(logits, values), logits)
    count = int(wanted.sum())
    if count == 0:
        return logits
    if count == len(wanted):
        return keep(logits, values)
    filtered = logits.clone()
    filtered[wanted] = keep(logits[wanted], values[wanted])
    return filtered
