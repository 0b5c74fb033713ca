"""What one more drafted token costs a round, from rounds that drafted more and fewer. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 200.0  # rounds
LEAST_VARIANCE = 0.05  # of drafted tokens a round; below it nothing can be told
FORGETTING = 0.995  # of what was told last, for each such round: rounds must differ again before it is told anew


@dataclass(slots=True)
class MarginalCost:
    """The slope of least squares of seconds over drafted tokens, older rounds fading."""

    seconds: float = 0.0
    weight: float = 0.0
    mean_tokens: float = 0.0
    mean_s: float = 0.0
    squares: float = 0.0  # of deviations of tokens
    products: float = 0.0  # of deviations of tokens and seconds

    def add(self, num_drafted: int, seconds: float) -> None:
        fade = 1.0 - 1.0 / MEMORY
        self.weight = fade * self.weight + 1.0
        off, off_s = num_drafted - self.mean_tokens, seconds - self.mean_s
        self.mean_tokens += off / self.weight
        self.mean_s += off_s / self.weight
        self.squares = fade * self.squares + off * (num_drafted - self.mean_tokens)
        self.products = fade * self.products + off * (seconds - self.mean_s)
        if self.squares > LEAST_VARIANCE * self.weight:
            self.seconds = max(0.0, self.products / self.squares)
        else:
            self.seconds *= FORGETTING
