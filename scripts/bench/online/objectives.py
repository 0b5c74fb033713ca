"""Which positions to learn from, by which divergence, from the same served tokens in the same
number of steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.learn.learner import Learner
from draftsmith.train.data.roles import Role
from scripts.bench.online.cells import SECOND, Cell
from scripts.bench.online.setting import LEARN, Setting

AWAY = 3 * 10**6
STEPS = 24
POSITIONS: dict[str, tuple[str, ...]] = {
    "first rejected": ("first-rejected",),
    "accepted": ("accepted",),
    "accepted, first rejected, bonus": ("accepted", "first-rejected", "bonus"),
    "all, later rejected too": ("accepted", "first-rejected", "bonus", "later-rejected"),
}
OFF_BY_ONE = "as OSD's code: one behind each correction or bonus"
DIVERGENCES = ("forward-kl", "reverse-kl", "tv", "lk-alpha")


def run_objectives(setting: Setting, cell: Cell) -> dict[str, Any]:
    count = int(cell.arguments["requests"])
    static = setting.load(setting.draft(cell.seed))
    texts = setting.texts(static, SECOND, count + max(16, count // 2), seed=cell.seed, begin=AWAY)
    taught, judged = texts[:count], texts[count:]
    rows = [
        {
            "positions": "static",
            "divergence": "",
            "alpha": setting.alpha(static, judged),
            "trained": 0,
        }
    ]
    for positions, divergence in product([*POSITIONS, OFF_BY_ONE], DIVERGENCES):
        given = [off_by_one(text) for text in taught] if positions == OFF_BY_ONE else taught
        wanted = POSITIONS.get(positions, ("first-rejected", "bonus"))
        config = replace(LEARN, positions=wanted, divergence=divergence, steps=STEPS, replay=0.0)
        learner = Learner(
            setting.load(setting.draft(cell.seed)), setting.target, config, seed=cell.seed
        )
        trained = learner.update(given).tokens
        with learner.averaged() as drafter:
            alpha = setting.alpha(drafter, judged)
        rows.append(
            {"positions": positions, "divergence": divergence, "alpha": alpha, "trained": trained}
        )
    return {"rows": rows, "texts": len(taught)}


def off_by_one(text: ServedText) -> ServedText:
    """OSD's published code takes the corrected token's own index where the distribution before it
    is meant, so it trains the token behind; and it notes the bonus token of a fully accepted round
    as if it had been a correction."""
    is_noted = np.isin(text.roles, (Role.FIRST_REJECTED, Role.BONUS))
    roles = np.full_like(text.roles, Role.CONTEXT)
    roles[1:][is_noted[:-1]] = Role.FIRST_REJECTED
    return replace(text, roles=roles)
