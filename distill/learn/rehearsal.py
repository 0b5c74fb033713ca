"""Texts of the data that a draft was trained on, for a part of each batch: what it was trained for
first comes up again, however long no such traffic does."""

from __future__ import annotations

import random

import numpy as np

from draftsmith.distill.config import LearnConfig
from draftsmith.drafters.target.target import Target
from draftsmith.train.config import TrainConfig
from draftsmith.train.data.batches import weights_of
from draftsmith.train.data.mixture import Mixed, read_mixture
from draftsmith.train.data.roles import Row


class Rehearsal:
    """A fixed sample of at most `count` training texts of data folders, so that the target's states
    of each are computed once and kept."""

    def __init__(self, texts: Mixed, count: int, *, seed: int):
        weights = None if texts.weights is None else np.array(texts.weights)
        chosen = np.random.default_rng(seed).choice(
            len(texts),
            min(count, len(texts)),
            replace=False,
            p=None if weights is None else weights / weights.sum(),
        )
        self.rows = [
            Row(one.input_ids.tolist(), weights_of(one).numpy())
            for one in (texts[at] for at in sorted(chosen.tolist()))
        ]

    def sample(self, count: int, rng: random.Random) -> list[Row]:
        return rng.sample(self.rows, min(count, len(self.rows)))


def rehearsal_of(config: LearnConfig, target: Target, *, seed: int) -> Rehearsal | None:
    """Texts of `learn.rehearse`, without the part that `train` holds out; None without folders.

    Raises:
        UserError: a folder that cannot be read, or of another tokenizer.
    """
    if not config.rehearse:
        return None
    mixture = read_mixture(
        config.rehearse,
        target,
        max_length=min(config.max_length, target.max_positions),
        held_out_share=TrainConfig.held_out,
    )
    return Rehearsal(mixture.train, config.reservoir, seed=seed)


def num_rehearsed(config: LearnConfig) -> int:
    """Texts of a batch that are rehearsed, which count as replayed ones."""
    return round(config.rehearse_share * config.batch) if config.rehearse else 0
