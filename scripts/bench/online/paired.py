"""alpha of a stream's drafts at the same positions of the same texts, exact: as served, of the
static draft, and of every candidate as if it had been live at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.gate.scoring import Scored, score
from draftsmith.distill.learn.learner import Rest, UpdateReport, no_rest
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.published import versions
from scripts.bench.online.setting import MAX_LENGTH, Setting
from scripts.bench.online.world import K, World

Weights = dict[str, torch.Tensor]


class Shadow:
    """Texts of a world in the order in which they ended, and its candidate after each update, with
    the number of texts before it."""

    def __init__(self, world: World):
        self.world, self.learner = world, world.daemon.shared.learner
        self.texts: list[ServedText] = []
        self.live: list[int] = []  # version of each text
        self.candidates: list[tuple[int, Weights]] = []
        self._sort_in, self._update = world.daemon.sort_in, self.learner.update
        world.daemon.sort_in = self._sorted  # type: ignore[method-assign]
        self.learner.update = self._updated  # type: ignore[method-assign]

    def _sorted(self, text: ServedText) -> None:
        self.texts.append(text)
        self.live.append(self.world.live)
        self._sort_in(text)

    def _updated(self, fresh: Sequence[ServedText], rest: Rest = no_rest) -> UpdateReport:
        report = self._update(fresh, rest)
        with self.learner.averaged() as candidate:
            weights = {name: value.clone() for name, value in candidate.state_dict().items()}
        self.candidates.append((len(self.texts), weights))
        return report


def paired(setting: Setting, world: World, shadow: Shadow, seed: int) -> dict[str, float]:
    texts, static = shadow.texts, setting.load(setting.draft(seed))
    fixed = alphas(setting, static, texts)
    return {
        "static": pooled(one.alpha for one in fixed),
        "live": pooled(served(setting, world, texts)),
        "at_once": pooled(at_once(setting, static, shadow, fixed)),
        "requests": len(texts),
    }


def served(setting: Setting, world: World, texts: Sequence[ServedText]) -> list[np.ndarray]:
    """alpha of the version that really drafted, at each position."""
    found = []
    for version in versions.versions(world.root):
        drafter = setting.load(versions.folder_of(world.root, version))
        mine = [text for text in texts if str(version) in versions_of(text)]
        found += [
            one.alpha[[name == str(version) for name in one.version]]
            for one in alphas(setting, drafter, mine)
        ]
    return found


def versions_of(text: ServedText) -> set[str]:
    return {record.draft_version for record in text.records}


def at_once(
    setting: Setting, drafter: TrainedDrafter, shadow: Shadow, static: Sequence[Scored]
) -> list[np.ndarray]:
    """alpha of the newest candidate of the time, which was trained on earlier texts alone; of the
    static draft before the first one."""
    begins = [begin for begin, _ in shadow.candidates] + [len(shadow.texts)]
    found = [one.alpha for one in static[: begins[0]]]
    for (begin, end), (_, weights) in zip(pairwise(begins), shadow.candidates, strict=True):
        drafter.load_state_dict(weights)
        found += [one.alpha for one in alphas(setting, drafter, shadow.texts[begin:end])]
    return found


def alphas(setting: Setting, drafter: TrainedDrafter, texts: Sequence[ServedText]) -> list[Scored]:
    return score(drafter, setting.target, texts, max_depth=K, max_length=MAX_LENGTH)


def pooled(some: Iterable[np.ndarray]) -> float:
    return float(np.concatenate(list(some)).mean())
