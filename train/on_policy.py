"""On-policy training: the current draft proposes after prefixes of the training texts, the target
verifies, and each position that verification looked at counts by its role there (`roles.py`).
Online learning trains on the same rows. The written texts are saved beside each checkpoint, so that
a resumed run trains on the same ones.

With few drafted tokens per round this is Draft-OPD (arXiv:2605.29343): errors are where the text
has them, and the rest of a rejected draft is replayed. With k as long as the answer every drafted
token is trained, kept or not, which is what DistillSpec (arXiv:2310.08461) does with the draft's
own samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.speculate import SpeculatedText, speculate
from draftsmith.drafters.target.target import Target
from draftsmith.files import as_values, read_json, restored, write_json
from draftsmith.train.config import OnPolicyConfig
from draftsmith.train.data.batches import joined, rows_at
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.data.roles import (
    Role,
    RoleWeights,
    TrainedRow,
    branch_of,
    branch_row,
    padded_rows,
    roles_of,
    text_row,
)

# Texts decoded at once.
DECODED = 32
# Rejected continuations trained per text, at most.
BRANCHES = 2


class OnPolicy:
    """Owns the texts that are waiting to be trained on; all else depends on seed, rank, step and
    the draft's weights alone."""

    def __init__(
        self,
        config: OnPolicyConfig,
        target: Target,
        sequences: Sequence[TokenSequence],
        *,
        batch_size: int,
        passes: int,
        seed: int,
        rank: int,
        max_length: int,
        text_weights: Sequence[float] | None = None,
    ):
        """`text_weights` of the sequences, where they are not drawn alike."""
        self.config, self.target, self.sequences = config, target, sequences
        self.text_weights = text_weights
        self.batch_size, self.passes = batch_size, passes
        self.seed, self.rank = seed, rank
        self.max_length = min(max_length, target.max_positions)
        self.weights = RoleWeights.at(config.positions, later_rejected=config.later_rejected)
        self.waiting: list[SpeculatedText] | None = None  # None until the first are written

    def mix(
        self, passes: list[TextBatch], *, step: int, drafter: Callable[[], torch.nn.Module]
    ) -> list[TextBatch]:
        """The passes of an optimizer step with their share of on-policy rows. New texts are due by
        the step alone, so that all ranks write theirs together; `drafter` gives the whole draft in
        evaluation mode."""
        if self.waiting is None or step % self.config.refresh == 0:
            self.waiting = self._write(
                drafter(), random.Random(f"{self.seed} texts {step} {self.rank}")
            )
        chance = random.Random(f"{self.seed} rows {step} {self.rank}")
        return [self._mixed(text, chance) for text in passes]

    def _share(self, num_rows: int) -> int:
        return min(num_rows, max(1, round(self.config.share * num_rows)))

    def _write(self, drafter: torch.nn.Module, chance: random.Random) -> list[SpeculatedText]:
        """Enough for the steps until the next ones are due."""
        count = self._share(self.batch_size) * self.passes * self.config.refresh
        chosen = self._drawn(count, chance)
        prompts = [prefix(sequence, self.config.tokens, chance) for sequence in chosen]
        seeds = [chance.getrandbits(62) for _ in prompts]
        texts: list[SpeculatedText] = []
        for begin in range(0, count, DECODED):
            part = slice(begin, begin + DECODED)
            rounds = speculate(
                drafter,
                self.target,
                prompts[part],
                k=self.config.k,
                temperature=self.config.temperature,
                seeds=seeds[part],
                max_new_tokens=self.config.tokens,
            )
            texts += rounds.texts
        return texts

    def _drawn(self, count: int, chance: random.Random) -> list[TokenSequence]:
        numbers = range(len(self.sequences))
        if self.text_weights is None:
            return [self.sequences[chance.randrange(len(numbers))] for _ in range(count)]
        return [self.sequences[at] for at in chance.choices(numbers, self.text_weights, k=count)]

    def _mixed(self, text: TextBatch, chance: random.Random) -> TextBatch:
        """Batch in which some rows give way to on-policy texts; branches come in addition."""
        num_rows = len(text.input_ids)
        count = self._share(num_rows)
        assert self.waiting is not None  # written before the first batch
        texts, self.waiting = self.waiting[:count], self.waiting[count:]
        kept = sorted(chance.sample(range(num_rows), num_rows - count))
        rows = [
            row.cut(self.max_length)
            for written in texts
            for row in rows_of(written, self.weights, BRANCHES, chance)
        ]
        own = padded_rows(rows, text.input_ids.device)
        own = replace(
            own, segments=own.attention_mask - 1, token_index=torch.full_like(own.input_ids, -1)
        )
        return joined(rows_at(text, kept), own)


def prefix(sequence: TokenSequence, num_new: int, chance: random.Random) -> list[int]:
    """The prompt, and as much of the answer as leaves about `num_new` tokens of it to be written
    anew."""
    written = [at for at in sequence.loss_mask.nonzero()[:, 0].tolist() if at > 0]
    latest = max(written[0], len(sequence.input_ids) - num_new)
    return sequence.input_ids[: chance.choice([at for at in written if at <= latest])].tolist()


def rows_of(
    text: SpeculatedText, weights: RoleWeights, num_branches: int, chance: random.Random
) -> list[TrainedRow]:
    """The text itself, then some of its branches."""
    roles: list[Role] = [Role.CONTEXT] * text.num_prompt
    for done in text.rounds:
        roles += roles_of(len(done.drafted), done.accepted, done.committed)
    rows = [text_row(text.tokens, np.array(roles, dtype=np.int8), weights)]
    if weights.later_rejected:
        found = [
            branch_of(text.tokens[: done.start], done.drafted, done.accepted)
            for done in text.rounds
        ]
        branches = [branch for branch in found if branch is not None]
        rows += [
            branch_row(branch, weights)
            for branch in chance.sample(branches, min(num_branches, len(branches)))
        ]
    return rows


class KeepTexts(TrainerCallback):
    """Saves the waiting texts with each checkpoint. Must be added before the callback that marks a
    checkpoint as complete."""

    def __init__(self, on_policy: OnPolicy):
        self.on_policy = on_policy

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any
    ) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        save_texts(self.on_policy, folder, world_size=args.world_size)


def save_texts(on_policy: OnPolicy, checkpoint: Path, *, world_size: int) -> None:
    texts = as_values(on_policy.waiting)
    write_json(
        _path(checkpoint, on_policy.rank), {"version": 1, "world_size": world_size, "texts": texts}
    )


def load_texts(on_policy: OnPolicy, checkpoint: Path, *, world_size: int) -> None:
    """Restores the waiting texts. Those of another number of processes are left, and new ones are
    written at the next step."""
    path = _path(checkpoint, on_policy.rank)
    record = read_json(path, "on-policy texts") if path.is_file() else {"texts": None}
    if record["texts"] is None or record["world_size"] != world_size:
        return
    on_policy.waiting = restored(list[SpeculatedText], record["texts"])


def _path(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"on_policy-{rank}.json"
