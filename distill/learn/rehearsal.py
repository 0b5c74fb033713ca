"""Texts of the data that a draft was trained on, for a part of each batch: what it was trained for
first comes up again, however long no such traffic does."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np

from draftsmith.distill.buffer.traffic import TrainedRow, is_held_out_prompt
from draftsmith.distill.config import GateConfig, LearnConfig
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.config import TrainConfig
from draftsmith.train.data.batches import weights_of
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.data.mixture import Mixed, read_mixture

SHARE = 0.25  # of a batch


class Rehearsal:
    """A fixed sample of at most `count` training texts of data folders, so that the target's states
    of each are computed once and kept. None has a prompt that `gate` holds out."""

    def __init__(self, texts: Mixed, count: int, *, gate: GateConfig, seed: int):
        weights = None if texts.weights is None else np.array(texts.weights)
        order = np.random.default_rng(seed).choice(
            len(texts),
            len(texts),
            replace=False,
            p=None if weights is None else weights / weights.sum(),
        )
        rows = (_row_of(texts[at]) for at in order.tolist())
        known = (row for row in rows if not _is_judged_on(row, gate))
        self.rows = list(islice(known, count))
        if not self.rows:
            raise UserError(
                "learn.rehearse names no text whose prompt may be trained on (gate.held_out is "
                f"{gate.held_out:g}); give more texts, or lower gate.held_out"
            )

    def sample(self, count: int, rng: random.Random) -> list[TrainedRow]:
        return rng.sample(self.rows, min(count, len(self.rows)))


def _row_of(text: TokenSequence) -> TrainedRow:
    return TrainedRow(text.input_ids.tolist(), weights_of(text).numpy())


def _is_judged_on(row: TrainedRow, gate: GateConfig) -> bool:
    """True where served answers to the row's prompt are held out."""
    if gate.held_out_by != "prompt":
        return False
    trained = np.flatnonzero(row.weights)
    prompt = row.tokens[: trained[0]] if len(trained) else row.tokens
    return is_held_out_prompt(prompt, gate.held_out)


def rehearsal_of(
    config: LearnConfig, target: Target, *, gate: GateConfig, seed: int
) -> Rehearsal | None:
    """Texts of `learn.rehearse`, without what `train` or the gate holds out; None without folders.

    Raises:
        UserError: a folder that cannot be read, is of another tokenizer or has no such text.
    """
    if not config.rehearse:
        return None
    try:
        mixture = read_mixture(
            config.rehearse,
            target,
            max_length=min(config.max_length, target.max_positions),
            held_out_share=TrainConfig.held_out,
        )
    except UserError as error:
        # To the reader the folders are those of `train --data`.
        said = str(error).replace("option 'data'", "the option")
        raise UserError(f"learn.rehearse: {said}") from None
    return Rehearsal(mixture.train, config.reservoir, gate=gate, seed=seed)


def num_rehearsed(config: LearnConfig) -> int:
    """Texts of a batch that are rehearsed, which count as replayed ones."""
    return round(min(SHARE, config.replay) * config.batch) if config.rehearse else 0
