"""Variants of the learner after a sudden shift, on the same texts, without a gate, and the draft
that is distilled offline from them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import LearnConfig
from draftsmith.distill.learn.learner import Learner
from draftsmith.drafters.interface import TrainedDrafter
from scripts.bench.markdown_table import header, line
from scripts.bench.online.cells import (
    FIRST,
    OFFLINE,
    SECOND,
    VARIANTS,
    VARIANTS_PART,
    Cell,
    part_of,
)
from scripts.bench.online.changes import JUDGED_AT, domain_of, stream_of, taught
from scripts.bench.online.curves import distill
from scripts.bench.online.measures import over_seeds, results
from scripts.bench.online.setting import Setting, varied
from scripts.bench.online.streams import blocks

Row = dict[str, Any]
JUDGED = 96  # texts
BEFORE = 0.1  # requests of the first domain, per request after the shift


def run_variant(setting: Setting, cell: Cell) -> Row:
    requests = int(cell.arguments["requests"])
    stream = blocks((FIRST, part_of(requests, BEFORE)), (SECOND, requests))
    texts = taught(stream_of(setting, cell, stream))
    static, drafter = (setting.load(setting.draft(cell.seed)) for _ in range(2))
    judged = setting.texts(static, SECOND, JUDGED, seed=cell.seed, begin=JUDGED_AT)
    found = {"texts": len(texts), "static": setting.alpha(static, judged)}
    begun_s = time.thread_time()
    if cell.name == OFFLINE:
        of_second = [one for one in texts if domain_of(one) == SECOND]
        distill(drafter, setting, of_second, seed=cell.seed)
    else:
        learn(drafter, setting, varied(cell.name), texts, seed=cell.seed)
    found["learn_s"] = time.thread_time() - begun_s
    return found | {"alpha": setting.alpha(drafter, judged)}


def learn(
    drafter: TrainedDrafter,
    setting: Setting,
    config: LearnConfig,
    texts: Sequence[ServedText],
    *,
    seed: int,
) -> None:
    """Updates in the order of the texts; the draft then has the mean of its weights."""
    learner = Learner(drafter, setting.target, config, seed=seed)
    for begin in range(0, len(texts) - config.fresh + 1, config.fresh):
        learner.update(texts[begin : begin + config.fresh])
    drafter.load_state_dict(drafter.state_dict() | learner.average)


def variants_table(rows: Sequence[Row]) -> list[str]:
    offline = results(rows, VARIANTS_PART, OFFLINE)
    lines = header("learner", "seeds", "alpha", "of the offline draft's", "CPU s")
    for name in (*VARIANTS, OFFLINE):
        found = results(rows, VARIANTS_PART, name)
        shares = [one["alpha"] / offline[s]["alpha"] for s, one in found.items() if s in offline]
        if found:
            alpha = over_seeds([one["alpha"] for one in found.values()]).text()
            spent = over_seeds([one["learn_s"] for one in found.values()]).text(0)
            lines.append(line(name, len(found), alpha, over_seeds(shares).text(), spent))
    return lines if len(lines) > 2 else []
