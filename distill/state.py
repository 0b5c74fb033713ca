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
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith import files
from draftsmith.distill.buffer import record_table
from draftsmith.distill.buffer.folder import Cursor
from draftsmith.distill.buffer.traffic import ServedText, stitch
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.gate.sequential import Ledger
from draftsmith.distill.learn.learner import Learner
from draftsmith.distill.learn.text_states import TextStates
from draftsmith.distill.throttle import Throttle
from draftsmith.drafters.target.target import Target
from draftsmith.errors import first_line
from draftsmith.record import RoundRecord

logger = logging.getLogger("draftsmith.distill")
SCHEMA_VERSION = 3
# Of the target, whose records are still texts to learn from.
MOST_REVISIONS = 1024
FOLDER = re.compile(r"state-(\d{8})")
LEARNER = "learner"
TEXTS = ("fresh", "window", "reservoir", "latest")


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
    """Saved values of the draft track beside its learner's."""

    live_version: int  # that the candidate is being compared with
    is_gate_due: bool
    ledger: Ledger
    drift: dict[str, Any]
    fresh: list[ServedText]
    window: list[ServedText]
    displaced: int | None = None  # version that the latest rollback left, if learning goes on
    spared: int = 0  # gate decisions left to a candidate that went on past it, to catch up

    def rebased(self) -> TrackState:
        """State for other weights of the target: its texts, and no evidence."""
        window = [text.unlogged() for text in self.window]
        fresh = [text.unlogged() for text in self.fresh]
        return TrackState(self.live_version, False, Ledger(), {}, fresh, window)


@dataclass
class Restored:
    cursor: Cursor
    counters: LearnerCounters
    open: list[RoundRecord]
    track: TrackState
    monitor: dict[str, Any] | None
    revisions: list[str]  # that the target had, oldest first, before the one at hand
    is_rebased: bool  # the state is of another one of them: no evidence is left


class StateFolder:
    def __init__(self, versions: str | Path):
        self.root = Path(versions) / LEARNER

    def numbers(self) -> list[int]:
        if not self.root.is_dir():
            return []
        found = [FOLDER.fullmatch(entry.name) for entry in self.root.iterdir()]
        return sorted(int(match[1]) for match in found if match)

    def save(
        self,
        learner: Learner,
        state: TrackState,
        *,
        cursor: Cursor,
        counters: LearnerCounters,
        target_revision: str,
        revisions: Sequence[str] = (),
        open_records: Sequence[RoundRecord],
        monitor: Mapping[str, Any] | None = None,
        with_records: bool = True,
    ) -> None:
        """Writes the track. Without records no served text reaches the disk, and a restart goes on
        without those in hand."""
        files.sweep(self.root)
        number = max(self.numbers(), default=0) + 1
        with files.atomic_folder(self.root / f"state-{number:08d}") as folder:
            _write_records(folder / "open.parquet", open_records if with_records else [])
            values = {
                "schema": SCHEMA_VERSION,
                "cursor": cursor,
                "counters": asdict(counters),
                "target_revision": target_revision,
                "revisions": list(revisions),
                "monitor": monitor,
                "track": _save_track(learner, state, folder, with_records),
            }
            files.write_json(folder / "state.json", values)
        for older in self.numbers()[:-1]:
            shutil.rmtree(self.root / f"state-{older:08d}", ignore_errors=True)

    def restore(self, learner: Learner, *, target_revision: str) -> Restored | None:
        """Fills `learner`. None when no state fits, which one line then reports."""
        for number in reversed(self.numbers()):
            folder = self.root / f"state-{number:08d}"
            try:
                return self._restore(folder, learner, target_revision)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                logger.warning(
                    "learner state %s cannot be used (%s); starting without it",
                    folder,
                    first_line(error),
                )
        return None

    def _restore(self, folder: Path, learner: Learner, target_revision: str) -> Restored:
        values: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if values["schema"] != SCHEMA_VERSION:
            raise ValueError(f"schema {values['schema']}, this is {SCHEMA_VERSION}")
        left = values["target_revision"]
        revisions = [one for one in values["revisions"] if one != target_revision]
        if is_rebased := left != target_revision:
            revisions = [*revisions, left][-MOST_REVISIONS:]
        counters, records = LearnerCounters(**values["counters"]), _records(folder / "open.parquet")
        # All or nothing: everything is read before the learner is touched.
        saved = _read_track(values["track"], learner.parameters, folder)
        if is_rebased:
            saved = saved.rebased()
            records = [record_table.tokens_only(record) for record in records]
        restored = Restored(
            values["cursor"],
            counters,
            records,
            saved.state,
            values["monitor"],
            revisions,
            is_rebased,
        )
        saved.fill(learner)
        return restored


def _save_track(
    learner: Learner, state: TrackState, folder: Path, with_records: bool
) -> dict[str, Any]:
    _save_tensors(learner, folder)
    kept_texts = state.fresh, state.window, learner.reservoir.texts, learner.reservoir.latest
    for name, texts in zip(TEXTS, kept_texts, strict=True):
        _write_records(folder / f"{name}.parquet", _flat(texts) if with_records else [])
    return {
        "state": asdict(replace(state, fresh=[], window=[])),
        "steps": learner.steps,
        "updates": learner.updates,
        "reservoir_seen": learner.reservoir.seen,
    }


class Saved(NamedTuple):
    """Values of the track as read, before any is applied."""

    state: TrackState
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    reservoir: list[ServedText]
    latest: list[ServedText]
    steps: int
    updates: int
    reservoir_seen: int

    def rebased(self) -> Saved:
        """Values for other weights of the target; see `TrackState.rebased`."""
        return self._replace(
            state=self.state.rebased(),
            reservoir=[text.unlogged() for text in self.reservoir],
            latest=[text.unlogged() for text in self.latest],
        )

    def fill(self, learner: Learner) -> None:
        learner.updates = self.updates
        kept = learner.reservoir
        kept.texts, kept.latest, kept.seen = self.reservoir, self.latest, self.reservoir_seen
        learner.fill(self.steps, self.weights, self.moments)


def _read_track(
    values: Mapping[str, Any], parameters: Mapping[str, torch.nn.Parameter], folder: Path
) -> Saved:
    fresh, window, reservoir, latest = (
        _texts(_records(folder / f"{name}.parquet")) for name in TEXTS
    )
    state = files.restored(TrackState, values["state"] | {"fresh": fresh, "window": window})
    weights, moments = (
        load_file(folder / "candidate.safetensors"),
        load_file(folder / "optimizer.safetensors"),
    )
    if {name: value.shape for name, value in weights.items()} != {
        name: value.shape for name, value in parameters.items()
    }:
        raise ValueError("its candidate has another shape than the live draft")
    if not all(bool(torch.isfinite(value).all()) for value in weights.values()):
        raise ValueError("its candidate has weights that are not finite")
    return Saved(
        state,
        weights,
        moments,
        reservoir,
        latest,
        values["steps"],
        values["updates"],
        values["reservoir_seen"],
    )


def _save_tensors(learner: Learner, folder: Path) -> None:
    for name, tensors in (("candidate", learner.parameters), ("optimizer", learner.moments())):
        compact = {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}
        save_file(compact, folder / f"{name}.safetensors")


def _flat(texts: Sequence[ServedText]) -> list[RoundRecord]:
    return [record for text in texts for record in text.records]


def _write_records(path: Path, records: Sequence[RoundRecord]) -> None:
    pq.write_table(record_table.to_table(records), path, compression="zstd")


def _records(path: Path) -> list[RoundRecord]:
    return record_table.from_table(pq.read_table(path))


def _texts(records: Sequence[RoundRecord]) -> list[ServedText]:
    """Texts of consecutive records; a new text begins with round 0."""
    groups: list[list[RoundRecord]] = []
    for record in records:
        if record.round == 0 or not groups:
            groups.append([])
        groups[-1].append(record)
    return [text for group in groups if (text := stitch(group)) is not None]


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
