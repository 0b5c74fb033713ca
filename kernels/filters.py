"""The sampling law of a request: temperature, then top-k, top-p and min-p, in transformers' order (sequential).

Sequential means that each filter sees the law the filter before it left, renormalised. N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftsmith.errors import UserError

# Below this, logits / temperature of ordinary models nears the float32 range and the law is greedy anyway.
MIN_TEMPERATURE = 1e-6
# Nearly always enough tokens to reach top-p, and far cheaper to find than an order of the whole vocabulary.
HEAD = 512


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of N rows. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch their filter off."""

    temperature: torch.Tensor  # [N] float32
    top_k: torch.Tensor  # [N] int64
    top_p: torch.Tensor  # [N] float64: 1 - top_p must round as it does for a Python number
    min_p: torch.Tensor  # [N] float32

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
        """From one Python value a row; a filter left out is off. A value outside its range raises a `UserError`."""
        num_rows = len(temperature)
        top_k = [0] * num_rows if top_k is None else top_k
        top_p = [1.0] * num_rows if top_p is None else top_p
        min_p = [0.0] * num_rows if min_p is None else min_p
        for value in temperature:
            if not (value == 0 or MIN_TEMPERATURE <= value < math.inf):
                raise UserError(f"temperature is {value}; it must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        _check("top_k", top_k, 0, math.inf)
        _check("top_p", top_p, 0, 1)
        _check("min_p", min_p, 0, 1)
        return cls(
            torch.tensor(temperature, dtype=torch.float32, device=device),
            torch.tensor(top_k, dtype=torch.int64, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            torch.tensor(min_p, dtype=torch.float32, device=device),
        )

    def select(self, rows: torch.Tensor) -> SamplingRows:
        return SamplingRows(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def repeat(self, counts: torch.Tensor) -> SamplingRows:
        """Row b becomes `counts[b]` consecutive rows."""
        return self.select(torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts))


def _check(name: str, values: Sequence[float], low: float, high: float) -> None:
    for value in values:
        if not low <= value <= high:
            raise UserError(f"{name} is {value}; it must be between {low} and {high}")


def process(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Raw logits [N, V] -> processed float32 logits [N, V], a new tensor: divided by temperature, filtered tokens at -inf.

    A greedy row becomes 0 at its argmax (the lowest id on a tie) and -inf elsewhere. NaN counts as -inf, +inf as the largest
    float. Every filter keeps one of the likeliest tokens, so a row is all -inf only when its input is.
    """
    processed = clean(logits.float())
    greedy = rows.temperature == 0
    # One device-to-host copy decides for the whole batch which passes are needed.
    cuts_k, cuts_p, cuts_min = (rows.top_k > 0) & ~greedy, (rows.top_p < 1) & ~greedy, (rows.min_p > 0) & ~greedy
    needs = torch.stack([greedy.any(), greedy.all(), (rows.temperature != 1).any(), cuts_k.any(), cuts_p.any(), cuts_min.any()])
    any_greedy, all_greedy, any_tempered, any_top_k, any_top_p, any_min_p = needs.tolist()
    if all_greedy:
        return greedy_logits(processed)
    source = processed
    if any_tempered:
        processed = processed / torch.where(greedy, 1.0, rows.temperature)[:, None]
        processed = processed.clamp(max=torch.finfo(torch.float32).max)
    if any_top_k:
        processed = _filter(keep_top_k, processed, rows.top_k, cuts_k)
    if any_top_p:
        processed = _filter(keep_top_p, processed, rows.top_p, cuts_p)
    if any_min_p:
        processed = _filter(keep_min_p, processed, rows.min_p, cuts_min)
    if any_greedy:
        processed[greedy] = greedy_logits(source[greedy])
    return processed


def clean(logits: torch.Tensor) -> torch.Tensor:
    """A copy with NaN as -inf and +inf as the largest float."""
    return torch.nan_to_num(logits, nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf)


def greedy_logits(logits: torch.Tensor) -> torch.Tensor:
    """[N, V] without NaN -> 0 at the argmax (lowest id on a tie), -inf elsewhere; an all -inf row stays so."""
    best, chosen = logits.max(dim=-1, keepdim=True)  # torch promises the first of several maxima
    one_hot = torch.full_like(logits, -math.inf)
    return one_hot.scatter_(-1, chosen, torch.where(best == -math.inf, best, 0.0))


def keep_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keeps the `top_k` [N] likeliest tokens of a row, and all that tie with the last of them."""
    size = logits.shape[-1]
    counts = top_k.clamp(1, size)
    largest = torch.topk(logits, int(counts.max()), dim=-1).values
    return logits.masked_fill(logits < largest.gather(-1, counts[:, None] - 1), -math.inf)


def keep_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the smallest set of likeliest tokens of a row whose probabilities reach `top_p` [N]; at least one."""
    if logits.shape[-1] <= HEAD:
        return _top_p_by_order(logits, top_p)
    kept, unsettled = _top_p_by_head(logits, top_p)
    if bool(unsettled.any()):
        kept[unsettled] = _top_p_by_order(logits[unsettled], top_p[unsettled])
    return kept


def _top_p_by_order(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ascending, order = torch.sort(logits, dim=-1, stable=True)
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= (1 - top_p.double()).to(logits.dtype)[:, None]
    removed[:, -1] = False
    return logits.masked_fill(removed.scatter(-1, order, removed), -math.inf)


def _top_p_by_head(logits: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the `HEAD` likeliest tokens: (filtered [N, V], rows [N] whose set may be larger or ends within a tie)."""
    head = torch.topk(logits, HEAD, dim=-1).values
    # exp(x - logsumexp) of the head only; logsumexp itself is many slow passes on a CPU, log_softmax one.
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
    return logits.masked_fill(probs < min_p.to(probs.dtype)[:, None] * probs.amax(dim=-1, keepdim=True), -math.inf)


def _filter(
    keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], logits: torch.Tensor, values: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Applies `keep` to the wanted rows only."""
    if bool(wanted.all()):
        return keep(logits, values)
    filtered = logits.clone()
    filtered[wanted] = keep(logits[wanted], values[wanted])
    return filtered
