"""Saved state of the learner and its parts: one folder that appears by one rename, so that a
restart neither repeats nor forgets a record.

`LEARNER/state-00000012/` holds `state.json` (plain values), `candidate.safetensors`,
`optimizer.safetensors` (tensors by the draft's trained parameters) and Parquet files of round
records: `open` (of requests still running), `fresh` (not yet trained on), `window` (held out),
`reservoir` and `latest` (to be replayed).
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
from draftsmith.distill.buffer.traffic import ServedText, stitch
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.gate.sequential import Ledger
from draftsmith.distill.learn.learner import Learner
from draftsmith.distill.learn.rehearsal import Rehearsal
from draftsmith.distill.learn.text_states import TextStates
from draftsmith.distill.monitor.monitor import Monitor
from draftsmith.distill.status import LearnerCounters
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
TENSORS = ("candidate", "optimizer")


@dataclass
class LearnerState:
    """State that a restart goes on from."""

    cursor: Cursor
    counters: LearnerCounters
    target_revision: str
    revisions: list[str]  # that the target had before, oldest first
    monitor: Monitor
    live_version: int  # that the candidate is being compared with
    is_gate_due: bool
    num_unscored: int  # held-out texts since the last look at a version in quarantine
    ledger: Ledger
    drift: dict[str, Any]
    steps: int
    updates: int
    reservoir_seen: int
    open: list[RoundRecord]
    fresh: list[ServedText]
    window: list[ServedText]
    reservoir: list[ServedText]
    latest: list[ServedText]
    candidate: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]

    def rebased(self, target_revision: str) -> LearnerState:
        """State for other weights of the target: its texts, and no evidence."""
        texts: dict[str, Any] = {
            name: [one.unlogged() for one in getattr(self, name)] for name in TEXTS
        }
        revisions = [one for one in self.revisions if one != target_revision]
        return replace(
            self,
            **texts,
            target_revision=target_revision,
            revisions=[*revisions, self.target_revision][-MOST_REVISIONS:],
            open=[record_table.tokens_only(record) for record in self.open],
            is_gate_due=False,
            num_unscored=len(self.window),
            ledger=Ledger(),
            drift={},
        )


class StateFolder:
    def __init__(self, versions: str | Path):
        self.root = Path(versions) / LEARNER

    def numbers(self) -> list[int]:
        if not self.root.is_dir():
            return []
        found = [FOLDER.fullmatch(entry.name) for entry in self.root.iterdir()]
        return sorted(int(match[1]) for match in found if match)

    def save(self, state: LearnerState, *, with_records: bool = True) -> None:
        """Without records no served text reaches the disk, and a restart goes on without those in
        hand."""
        files.sweep(self.root)
        number = max(self.numbers(), default=0) + 1
        values = {one.name: getattr(state, one.name) for one in fields(state)}
        with files.atomic_folder(self.root / f"state-{number:08d}") as folder:
            records = {"open": values.pop("open")} | {
                name: [record for text in values.pop(name) for record in text.records]
                for name in TEXTS
            }
            for name, kept in records.items():
                _write_records(folder / f"{name}.parquet", kept if with_records else [])
            for name in TENSORS:
                save_file(
                    {
                        key: value.detach().cpu().clone().contiguous()
                        for key, value in values.pop(name).items()
                    },
                    folder / f"{name}.safetensors",
                )
            values = {"schema": SCHEMA_VERSION, **files.as_values(values)}
            files.write_json(folder / "state.json", values)
        for older in self.numbers()[:-1]:
            shutil.rmtree(self.root / f"state-{older:08d}", ignore_errors=True)

    def restore(self, learner: Learner, *, target_revision: str) -> LearnerState | None:
        """Fills `learner`. None when no state fits, which one line then reports."""
        for number in reversed(self.numbers()):
            folder = self.root / f"state-{number:08d}"
            try:
                # All or nothing: everything is read before the learner is touched.
                state = _read(folder, learner.parameters)
                if state.target_revision != target_revision:
                    state = state.rebased(target_revision)
                learner.fill(state.steps, state.candidate, state.optimizer)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                logger.warning(
                    "learner state %s cannot be used (%s); starting without it",
                    folder,
                    first_line(error),
                )
                continue
            learner.updates, kept = state.updates, learner.reservoir
            kept.texts, kept.latest, kept.seen = state.reservoir, state.latest, state.reservoir_seen
            return state
        return None


def _read(folder: Path, parameters: Mapping[str, torch.nn.Parameter]) -> LearnerState:
    values: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if (schema := values.pop("schema")) != SCHEMA_VERSION:
        raise ValueError(f"schema {schema}, this is {SCHEMA_VERSION}")
    values["open"] = _records(folder / "open.parquet")
    values |= {name: _texts(_records(folder / f"{name}.parquet")) for name in TEXTS}
    values |= {name: load_file(folder / f"{name}.safetensors") for name in TENSORS}
    state: LearnerState = files.restored(LearnerState, values)
    if {name: value.shape for name, value in state.candidate.items()} != {
        name: value.shape for name, value in parameters.items()
    }:
        raise ValueError("its candidate has another shape than the live draft")
    if not all(bool(torch.isfinite(value).all()) for value in state.candidate.values()):
        raise ValueError("its candidate has weights that are not finite")
    return state


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
    rehearsal: Rehearsal | None
    states: TextStates  # of the target on the texts that are trained and scored

    @property
    def has_updates_left(self) -> bool:
        most = self.config.max_updates
        return most is None or self.counters.updates < most
