"""Expected tokens and seconds of a round at each k, from measured times, survival and the text that
a draft has to read."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from draftsmith.serve.control.control import RoundResult, RowBudget, RowResult
from draftsmith.serve.control.latency import Bucket, LatencyTable
from draftsmith.serve.control.survival import Survival

MEMORY = 1000.0  # tokens that the share of prompts goes over


class RoundLoad(NamedTuple):
    number: Bucket
    rows: Counter[RowBudget]  # equal ones counted together
    deepest: int


class Forecast(NamedTuple):
    """Expectations by k, from 0 on."""

    tokens: list[float]
    seconds: list[float]
    doubts: list[float]  # deviation of the tokens of one more depth
    late_s: float  # more than usual, of the first round that drafts after others

    @property
    def rates(self) -> list[float]:
        return [count / time for count, time in zip(self.tokens, self.seconds, strict=True)]

    def depth_s(self, k: int) -> float:
        """Seconds of one more depth about this k."""
        low, high = max(1, k - 1), min(max(k, 1) + 1, len(self.seconds) - 1)
        return max(0.0, self.seconds[high] - self.seconds[low]) / max(1, high - low)


class LateRead(NamedTuple):
    """Round in which a draft read text first."""

    number: Bucket
    k: int
    num_catch_up: int
    seconds: float


class Forecaster:
    """Forecasts from `latency` and `survival`, which others fill in."""

    def __init__(self, latency: LatencyTable, survival: Survival):
        self.latency, self.survival = latency, survival
        self._decided = self._fed = 0.0  # fading sums: tokens decided, prompt tokens fed
        self._late: deque[LateRead] = deque(maxlen=8)

    def note_late_read(self, number: Bucket, result: RoundResult) -> None:
        self._late.append(LateRead(number, result.k, result.num_catch_up, result.seconds))

    def note_prompts(self, result: RoundResult, rested_rows: int, rested_tokens: int) -> None:
        """Count what a draft has to read for each token decided, in rounds at rest before too."""
        rows = result.num_rows + rested_rows
        tokens = rows + sum(map(self._kept, result.offers))
        fade = max(0.0, 1.0 - tokens / MEMORY)
        self._decided = fade * self._decided + tokens
        fed = result.num_tokens + rested_tokens - rows
        self._fed = fade * self._fed + max(0, fed)

    def _kept(self, row: RowResult) -> float:
        """Accepted drafts of a row; as many as are expected where they may not be counted."""
        if row.accepted is None:
            return sum(self.survival.chances(row.request_class, row.offered))
        return row.accepted

    def forecast(self, load: RoundLoad, k_of: Callable[[RowBudget, int], int]) -> Forecast:
        """`k_of` is the k that a row gets where k is chosen."""
        tokens = [float(load.rows.total())] * (load.deepest + 1)
        drafted = [0] * (load.deepest + 1)
        doubts = [0.0] * load.deepest
        spreads = self.survival.spreads(load.deepest)
        for budget, count in load.rows.items():
            chances = self.survival.chances(budget.request_class, load.deepest)
            kept = list(accumulate(chances, initial=0.0))
            for k in range(1, load.deepest + 1):
                own = k_of(budget, k)
                tokens[k] += count * kept[own]
                drafted[k] += count * own
                reached = 1.0 if k == 1 else chances[k - 2]
                doubts[k - 1] += count * reached * spreads[k - 1]
        token_s, late_s = self._reading_s()
        plain_s = self._seconds(load, 0)
        seconds = [plain_s]
        for k in range(1, load.deepest + 1):
            scale = share_of_price(drafted[k], load.rows.total() * k)
            more_s = scale * max(0.0, self._seconds(load, k) - plain_s)
            # A draft reads as many prompts as are fed for these tokens.
            read_s = token_s * self._fed / max(self._decided, 1.0) * tokens[k]
            seconds.append(plain_s + more_s + read_s)
        return Forecast(tokens, seconds, doubts, late_s)

    def _reading_s(self) -> tuple[float, float]:
        """Seconds that a draft takes to read a token of text, and most that it took in a round."""
        known = [late for late in self._late if self.latency.measured(late.number, late.k)]
        extra_s = [
            max(0.0, late.seconds - self.latency.seconds(late.number, late.k)) for late in known
        ]
        unread = sum(late.num_catch_up for late in known)
        return sum(extra_s) / max(unread, 1), max(extra_s, default=0.0)

    def _seconds(self, load: RoundLoad, k: int) -> float:
        """Expected seconds of a round at depth k, less those of prompts, beside which a draft would
        look cheap."""
        alone = load.number.alone
        seconds = self.latency.seconds(load.number, k)
        if alone == load.number:
            return seconds
        measured = self.latency.measured(load.number, 0) and self.latency.measured(load.number, k)
        if not measured:
            return self.latency.seconds(alone, k)
        without_s = self.latency.seconds(load.number, 0)
        prompts_s = without_s - min(without_s, self.latency.seconds(alone, 0))
        # Estimates of two k may contradict each other by more than a round without prompts takes.
        return max(seconds - prompts_s, 0.1 * seconds)


def share_of_price(drafted: int, most: int) -> float:
    """Share of the price of a depth where only some rows draft so deep: about half of it goes by
    the depth, half by the tokens."""
    return 1.0 if most == 0 else 0.5 + 0.5 * drafted / most
