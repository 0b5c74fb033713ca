"""Number of tokens to draft: fixed, or by measurements while serving (`auto.py`); and the
temperatures that drafts are drawn at. Torch-free.

What is chosen here is chosen before anything of the round is drawn (invariant 4), so it cannot
change the distribution of the output. It does change which random numbers decide a position: token
for token, a seeded request repeats at a fixed k only.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from draftsmith.serve.sampling.params import SamplingParams

MAX_K = 64
MAX_AUTO_K = 8  # draft tokens per round that `auto` goes up to


class RowBudget(NamedTuple):
    """A row that is about to decide tokens."""

    request_class: str
    most: int  # drafts it may have: the request's own k, and the room left in its answer


class RowResult(NamedTuple):
    """Tokens of a row: planned, accepted, and those that the drafter had. The last two are None
    where the request's draws can be repeated (`Request.repeatable`): no control may depend on
    them."""

    request_class: str
    offered: int
    accepted: int | None
    drafted: int | None = None


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Choice for a round, with the values that its control needs again when the round is over."""

    ks: list[int]  # of each row
    # A row's drafts end where the drafter itself thinks them less likely to be kept, all of them,
    # than this; see DraftInputs.
    least_survival: float = field(default=0.0, kw_only=True)
    # k = 0 for every row, chosen without a look at them; `observe` is not called
    at_rest: bool = field(default=False, kw_only=True)


@lru_cache(maxsize=512)
def rest_plan(num_rows: int) -> RoundPlan:
    """Plan of a round at rest."""
    return RoundPlan([0] * num_rows, at_rest=True)


class RoundResult(NamedTuple):
    plan: RoundPlan | None  # None: no row was decoding, so nothing was chosen
    num_tokens: int  # known tokens that went through the target
    num_rows: int  # rows that decided
    k: int  # the deepest draft, as planned
    seconds: float
    catching_up: bool  # the draft read far more than the last round's tokens
    offers: Sequence[RowResult]
    num_catch_up: int = 0  # tokens that the drafts had yet to read


class Control:
    """Every request drafts its own k. What overrides `observe` also says that it learns."""

    learns = False  # `observe` need not be called

    def rests(self, classes: Set[str], num_rows: int, num_tokens: int) -> bool:
        """True when a round of this load, with rows of these classes, goes by `rest_plan` in place
        of `choose`: nothing has drafted for long, and what choosing and observing take is more than
        they may bring. Called once a round."""
        return False

    def choose(self, budgets: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        """The k of each row; `num_tokens` known tokens are expected in the pass."""
        return RoundPlan([budget.most for budget in budgets])

    def observe(self, result: RoundResult) -> None:
        """Take the result of a round; rounds that did not follow their plan are left out."""

    def new_draft(self) -> None:
        """Note that other weights draft from now on."""

    def new_text(self) -> None:
        """Note that a request which may draft is read for the first time."""


def draft_temperature(params: SamplingParams, *, greedy: bool) -> float:
    """Temperature that a row's drafts are drawn at. `greedy`: they are the draft's likeliest tokens
    where the request does not name a temperature."""
    if params.draft_temperature is not None:
        return params.draft_temperature
    return 0.0 if greedy else params.temperature


def sampler_name(params: SamplingParams, *, drawn: bool, greedy: bool) -> str:
    """Choice of a row's drafted tokens, as its record names it. `drawn` is False for tokens that
    are not drawn from a distribution."""
    temperature = draft_temperature(params, greedy=greedy) if drawn else 0.0
    if temperature == 0:
        return "greedy"
    return "probabilistic" if temperature == params.temperature else "tempered"
