"""k auto beside draft trees: a round's rows grow their trees or none, whichever brings more tokens
per second. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import hypot

from draftsmith.serve.control.auto import AutoControl
from draftsmith.serve.control.control import RoundPlan, RoundResult, RowBudget
from draftsmith.serve.control.survival import Survival


class _Heights(Survival):
    """A tree counts as one draft, which brings as many tokens as its kept path is deep."""

    def __init__(self, depth: int):
        super().__init__()
        self.depth = depth

    def add(self, request_class: str, offered: int, accepted: int, times: int = 1) -> None:
        super().add(request_class, min(offered, self.depth), accepted, times)

    def chances(self, request_class: str, k: int) -> list[float]:
        return [sum(super().chances(request_class, self.depth))] if k > 0 else []

    def spreads(self, k: int) -> list[float]:
        """Deviation of the height: what each depth's chance makes of it and of all deeper ones."""
        if k == 0:
            return []
        chances = super().chances("", self.depth)
        reached = [1.0, *chances]
        parts = [
            spread * reached[depth] / chances[depth] * sum(chances[depth:])
            for depth, spread in enumerate(super().spreads(self.depth))
        ]
        return [hypot(*parts)]


@dataclass(frozen=True, slots=True)
class _Plan(RoundPlan):
    chosen: RoundPlan  # in trees: 0 or 1 a row


class TreeControl:
    """Trees have one size, as `AutoControl` sees it 1: what it weighs against 0 by measured rounds
    and the depth kept so far. `depth` is that of the trees."""

    learns = True

    def __init__(self, depth: int):
        self._control = AutoControl(start=1, survival=_Heights(depth))

    def rests(self, classes: Set[str], num_rows: int, num_tokens: int) -> bool:
        return self._control.rests(classes, num_rows, num_tokens)

    def choose(self, budgets: Sequence[RowBudget], num_tokens: int) -> RoundPlan:
        chosen = self._control.choose(
            [budget._replace(most=min(budget.most, 1)) for budget in budgets], num_tokens
        )
        return _Plan(
            [budget.most if trees else 0 for budget, trees in zip(budgets, chosen.ks, strict=True)],
            chosen,
        )

    def observe(self, result: RoundResult) -> None:
        plan = result.plan.chosen if isinstance(result.plan, _Plan) else None
        self._control.observe(result._replace(plan=plan, k=min(result.k, 1)))

    def new_draft(self) -> None:
        self._control.new_draft()
