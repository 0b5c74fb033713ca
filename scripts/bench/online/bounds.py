"""Bounds of what a stream leaves to win: a draft of its own for each domain, routed to at once, and
a bank of the versions published so far, returned to at once or by evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from draftsmith.distill.buffer.traffic import ServedText, is_held_out
from draftsmith.distill.gate.gate import difference
from draftsmith.distill.gate.scoring import Scored
from draftsmith.distill.gate.sequential import TurningEvidence
from draftsmith.distill.learn.learner import Learner
from draftsmith.drafters.published import versions
from scripts.bench.online.cells import BOUNDS, CURVES, Cell
from scripts.bench.online.domains import asks
from scripts.bench.online.paired import Shadow, alphas, at_once, pooled
from scripts.bench.online.setting import GATE, Setting, learning
from scripts.bench.online.world import CYCLE, World

Scores = Mapping[int, Sequence[Scored]]  # of every text, by version


def run_bounds(setting: Setting, cell: Cell) -> dict[str, Any]:
    curve, requests = CURVES[cell.name.removesuffix(f"-{BOUNDS}")], int(cell.arguments["requests"])
    chosen, draft = learning(curve.learner, requests), setting.draft(cell.seed)
    with setting.room(f"{cell.name}-{cell.seed}") as folder:
        world = World(setting.target, draft, folder, chosen.learn, gate=chosen.gate, seed=cell.seed)
        shadow = Shadow(world)
        for _ in world.serve(asks(setting.prompts(cell.seed), curve.stream(requests))):
            pass
        scores = {
            version: alphas(
                setting, setting.load(versions.folder_of(world.root, version)), shadow.texts
            )
            for version in versions.versions(world.root)
        }
    domains = [text.records[0].request_class for text in shadow.texts]
    own = own_drafts(setting, cell.seed, shadow.texts, domains)
    static = scores[1]
    return {
        "static": pooled(one.alpha for one in static),
        "published": pooled(scores[at][i].alpha for i, at in enumerate(shadow.live)),
        "at_once": pooled(at_once(setting, setting.load(draft), shadow, static)),
        "bank": pooled(with_bank(scores, shadow.live)),
        "bank_at_once": pooled(best_by_domain(scores, shadow.live, domains)),
        "own": pooled(own),
        "versions": len(scores),
    }


def own_drafts(
    setting: Setting, seed: int, texts: Sequence[ServedText], domains: Sequence[str]
) -> list[np.ndarray]:
    """alpha of a draft that learns from the text's domain alone, at each text as it is after the
    texts before."""
    found: list[np.ndarray] = [np.zeros(0)] * len(texts)
    chosen = learning("learning", len(texts)).learn
    for domain in sorted(set(domains)):
        drafter = setting.load(setting.draft(seed))
        learner = Learner(drafter, setting.target, chosen, seed=seed)
        fresh: list[ServedText] = []
        waiting: list[int] = []
        mine = [index for index, name in enumerate(domains) if name == domain]
        for index in mine:
            waiting.append(index)
            if not is_held_out(texts[index], GATE.held_out):
                fresh.append(texts[index])
            if len(fresh) < chosen.fresh and index != mine[-1]:
                continue
            with learner.averaged():
                scored = alphas(setting, drafter, [texts[one] for one in waiting])
            for at, one in zip(waiting, scored, strict=True):
                found[at] = one.alpha
            learner.update(fresh)
            fresh, waiting = [], []
    return found


def with_bank(scores: Scores, live: Sequence[int]) -> list[np.ndarray]:
    """alpha where the learner returns, from one text to the next, to a version that is better on
    the texts since the latest change, by the watch's evidence. `live` is the newest version at each
    text."""
    found, now, since = [], live[0], 0
    evidence: dict[int, TurningEvidence] = {}
    for index, newest in enumerate(live):
        if index and newest != live[index - 1]:
            now, since, evidence = newest, index, {}
        found.append(scores[now][index].alpha)
        if (index + 1) % CYCLE:
            continue
        window = range(max(since, index + 1 - GATE.window), index + 1)
        better = better_version(scores, now, newest, window, evidence)
        if better is not None:
            now, since, evidence = better, index + 1, {}
    return found


def better_version(
    scores: Scores,
    now: int,
    newest: int,
    window: Sequence[int],
    evidence: dict[int, TurningEvidence],
) -> int | None:
    gains = {}
    bank = [version for version in scores if version <= newest and version != now]
    for version in bank:
        pairs = {str(at): (scores[now][at].alpha, scores[version][at].alpha) for at in window}
        gained = {name: difference(*pair) for name, pair in pairs.items() if len(pair[0])}
        value = evidence.setdefault(version, TurningEvidence()).look(gained)
        gain = float(np.mean(list(gained.values()))) if gained else 0.0
        if gain > GATE.gain and value * GATE.error >= len(bank):
            gains[version] = gain
    return max(gains, key=lambda version: gains[version]) if gains else None


def best_by_domain(scores: Scores, live: Sequence[int], domains: Sequence[str]) -> list[np.ndarray]:
    """alpha with the version that, of those published so far, is the best from there on for the
    text's domain, by hindsight."""

    def after(version: int, index: int) -> float:
        mine = [at for at in range(index, len(live)) if domains[at] == domains[index]]
        return pooled(scores[version][at].alpha for at in mine)

    return [
        scores[max((one for one in scores if one <= newest), key=lambda one: after(one, index))][
            index
        ].alpha
        for index, newest in enumerate(live)
    ]
