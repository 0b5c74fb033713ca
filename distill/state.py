"""Saved state of the learner and its parts: one folder that appears by one rename, so that a
restart neither repeats nor forgets a record.

`LEARNER/state-00000012/` holds `state.json` (the buffer cursor, the counters and the values of the
draft track), `candidate.safetensors`, `optimizer.safetensors` (tensors by the draft's trained
parameters) and Parquet files of round records: `open` (of requests still running), `fresh` (not yet
trained on), `window` (held out), `reservoir` and `latest` (to be replayed).
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith import files
from draftsmith.distill.buffer import record_table
from draftsmith.distill.buffer.folder import Cursor
from draftsmith.distill.buffer.traffic import OpenRequests, ServedText
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.gate.sequential import Ledger
from draftsmith.distill.learn.learner import Learner
from draftsmith.distill.learn.text_states import TextStates
from draftsmith.distill.monitor.monitor import Monitor
from draftsmith.distill.throttle import Throttle
from draftsmith.drafters.target.target import Target
from draftsmith.errors import first_line
from draftsmith.record import RoundRecord

logger = logging.getLogger("draftsmith.distill")
SCHEMA_VERSION = 4
# Of the target, whose records are still texts to learn from.
MOST_REVISIONS = 1024
FOLDER = re.compile(r"state-(\d{8})")
LEARNER = "learner"
TEXTS = ("fresh", "window", "reservoir", "latest")
OPEN = "open"


@dataclass
class LearnerCounters:
    """Totals since the first start."""

    records: int = 0
    damaged_shards: int = 0
    seeded: int = 0  # records of sampled requests with a seed of their own, which are left out
    foreign: int = 0  # records of another target
    earlier: int = 0  # records of weights that the target had before, whose tokens alone are kept
    untapped: int = 0  # texts without the states that the draft is to read from records
    orphans: int = 0
    texts: int = 0  # trained on
    held_out: int = 0
    updates: int = 0
    # of rows in batches: a text that is trained on again counts again
    positions_trained: int = 0
    positions_masked: int = 0  # not trained, as no distribution is recorded
    published: int = 0
    held: int = 0
    refused: int = 0
    rolled_back: int = 0
    drift_alarms: int = 0

    def take_over(self, other: LearnerCounters) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(other, one.name))

    def count(self, decision: str) -> None:
        self.published += decision == "accept"
        self.held += decision == "hold"
        self.refused += decision == "refuse"


TOTALS = frozenset(one.name for one in fields(LearnerCounters))


@dataclass
class TrackState:
    """Saved values of the draft track and its learner. Tensors and texts are files of their own."""

    live_version: int  # that the candidate is being compared with
    is_gate_due: bool
    ledger: Ledger
    drift: dict[str, Any]
    steps: int
    updates: int
    reservoir_seen: int
    fresh: list[ServedText]
    window: list[ServedText]
    reservoir: list[ServedText]
    latest: list[ServedText]
    displaced: int | None = None  # version that the latest rollback left, if learning goes on
    spared: int = 0  # gate decisions left to a candidate that went on past it, to catch up

    def rebased(self) -> TrackState:
        """State for other weights of the target: its texts, and no evidence."""
        kept: dict[str, Any] = {
            name: [text.unlogged() for text in getattr(self, name)] for name in TEXTS
        }
        kept |= {"is_gate_due": False, "ledger": Ledger(), "drift": {}}
        return replace(self, **kept, displaced=None, spared=0)


@dataclass
class LearnerState:
    """All that a restart goes on from, but the candidate's tensors."""

    target_revision: str
    revisions: list[str]  # that the target had, oldest first, before the one at hand
    cursor: Cursor
    counters: LearnerCounters
    monitor: Monitor
    track: TrackState
    open: list[RoundRecord]

    def rebased(self, revision: str) -> LearnerState:
        """State for other weights of the target: no evidence is left."""
        others = [one for one in self.revisions if one != revision]
        if self.target_revision == revision:
            return replace(self, revisions=others)
        return replace(
            self,
            revisions=[*others, self.target_revision][-MOST_REVISIONS:],
            track=self.track.rebased(),
            open=[record_table.tokens_only(record) for record in self.open],
        )


class StateFolder:
    def __init__(self, versions: str | Path):
        self.root = Path(versions) / LEARNER

    def numbers(self) -> list[int]:
        if not self.root.is_dir():
            return []
        found = [FOLDER.fullmatch(entry.name) for entry in self.root.iterdir()]
        return sorted(int(match[1]) for match in found if match)

    def save(self, learner: Learner, state: LearnerState, *, with_records: bool = True) -> None:
        """Without records no served text reaches the disk, and a restart goes on without those in
        hand."""
        files.sweep(self.root)
        number = max(self.numbers(), default=0) + 1
        records = {name: _flat(getattr(state.track, name)) for name in TEXTS} | {OPEN: state.open}
        nothing: dict[str, Any] = {name: [] for name in TEXTS}
        values = replace(state, track=replace(state.track, **nothing), open=[])
        with files.atomic_folder(self.root / f"state-{number:08d}") as folder:
            _save_tensors(learner, folder)
            for name, some in records.items():
                table = record_table.to_table(some if with_records else [])
                pq.write_table(table, folder / f"{name}.parquet", compression="zstd")
            entries = {"schema": SCHEMA_VERSION, **files.as_values(values)}
            files.write_json(folder / "state.json", entries)
        for older in self.numbers()[:-1]:
            shutil.rmtree(self.root / f"state-{older:08d}", ignore_errors=True)

    def restore(self, learner: Learner, *, target_revision: str) -> LearnerState | None:
        """Fills `learner`. None when no state fits, which one line then reports. `target_revision`
        of a state of other weights stays theirs."""
        for number in reversed(self.numbers()):
            folder = self.root / f"state-{number:08d}"
            try:
                # All or nothing: everything is read before the learner is touched.
                state = _read_state(folder).rebased(target_revision)
                weights, moments = _read_tensors(folder, learner)
                learner.fill(state.track.steps, weights, moments)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                logger.warning(
                    "learner state %s cannot be used (%s); starting without it",
                    folder,
                    first_line(error),
                )
                continue
            track, kept = state.track, learner.reservoir
            learner.updates, kept.seen = track.updates, track.reservoir_seen
            kept.texts, kept.latest = track.reservoir, track.latest
            return state
        return None


def _read_state(folder: Path) -> LearnerState:
    values: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if (schema := values.pop("schema")) != SCHEMA_VERSION:
        raise ValueError(f"schema {schema}, this is {SCHEMA_VERSION}")
    records = {
        name: record_table.from_table(pq.read_table(folder / f"{name}.parquet"))
        for name in (*TEXTS, OPEN)
    }
    texts = {name: OpenRequests(records[name]).take(idle_s=0.0) for name in TEXTS}
    values |= {"track": values["track"] | texts, OPEN: records[OPEN]}
    return files.restored(LearnerState, values)


def _read_tensors(
    folder: Path, learner: Learner
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of the candidate, and the optimizer's moments."""
    weights, moments = (
        load_file(folder / "candidate.safetensors"),
        load_file(folder / "optimizer.safetensors"),
    )
    if {name: value.shape for name, value in weights.items()} != {
        name: value.shape for name, value in learner.parameters.items()
    }:
        raise ValueError("its candidate has another shape than the live draft")
    if not all(bool(torch.isfinite(value).all()) for value in weights.values()):
        raise ValueError("its candidate has weights that are not finite")
    return weights, moments


def _save_tensors(learner: Learner, folder: Path) -> None:
    for name, tensors in (("candidate", learner.parameters), ("optimizer", learner.moments())):
        compact = {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}
        save_file(compact, folder / f"{name}.safetensors")


def _flat(texts: Sequence[ServedText]) -> list[RoundRecord]:
    return [record for text in texts for record in text.records]


@dataclass(frozen=True)
class LearnerContext:
    config: DistillConfig
    target: Target
    throttle: Throttle
    counters: LearnerCounters
    report: Callable[[str], None]  # prints a line for people
    save: Callable[[], None]  # saves the state
    cursor: Callable[[], Mapping[str, int]]  # records read so far, per writer of the buffer
    states: TextStates  # of the target on the texts that are trained and scored

    @property
    def has_updates_left(self) -> bool:
        most = self.config.max_updates
        return most is None or self.counters.updates < most
