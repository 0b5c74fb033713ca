"""The learner's state on disk: one folder that appears by one rename, so that a restart neither repeats nor forgets a record.

`LEARNER/state-00000012/` holds `state.json` (the buffer cursor and the counters), `candidate.safetensors` and
`optimizer.safetensors` (tensors in the order of the draft's trained parameters) and four Parquet files of round records:
`open` (requests still running), `fresh` (not yet trained on), `window` (held out) and `reservoir`.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith import files
from draftsmith.distill import record_table
from draftsmith.distill.folder import Cursor
from draftsmith.distill.learner import Learner
from draftsmith.distill.sequential import Ledger
from draftsmith.distill.traffic import ServedText, stitch
from draftsmith.serve.record import RoundRecord

logger = logging.getLogger("draftsmith.distill")

SCHEMA_VERSION = 2
FOLDER = re.compile(r"state-(\d{8})")
LEARNER = "learner"


@dataclass
class Counters:
    """Totals since the first start."""

    records: int = 0
    damaged_shards: int = 0
    foreign: int = 0  # records of another target
    orphans: int = 0
    texts: int = 0  # trained on
    held_out: int = 0
    updates: int = 0
    published: int = 0
    held: int = 0
    refused: int = 0
    rolled_back: int = 0
    drift_alarms: int = 0
    is_gate_due: bool = False  # stays set while held-out requests are too few, or a full disk prevents a publication

    def count(self, decision: str) -> None:
        self.published += decision == "accept"
        self.held += decision == "hold"
        self.refused += decision == "refuse"


TOTALS = frozenset(one.name for one in fields(Counters) if one.name != "is_gate_due")


@dataclass
class TrafficState:
    """Records by what has become of them."""

    open: list[RoundRecord] = field(default_factory=list)
    fresh: list[ServedText] = field(default_factory=list)
    window: list[ServedText] = field(default_factory=list)


@dataclass
class Restored:
    cursor: Cursor
    counters: Counters
    ledger: Ledger
    live_version: int  # that the candidate was being compared with
    traffic: TrafficState


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
        *,
        cursor: Cursor,
        counters: Counters,
        ledger: Ledger,
        live_version: int,
        target_revision: str,
        traffic: TrafficState,
        with_records: bool = True,
    ) -> None:
        """Without records nothing that was served reaches the disk, and a restart goes on without what it had in hand."""
        self._sweep()
        number = max(self.numbers(), default=0) + 1
        with files.atomic_folder(self.root / f"state-{number:08d}") as folder:
            _save_tensors(learner, folder)
            tables = {
                "open": traffic.open,
                "fresh": _flat(traffic.fresh),
                "window": _flat(traffic.window),
                "reservoir": _flat(learner.reservoir.texts),
            }
            if not with_records:
                tables = {name: [] for name in tables}
            for name, records in tables.items():
                pq.write_table(record_table.to_table(records), folder / f"{name}.parquet", compression="zstd")
            values = {
                "schema": SCHEMA_VERSION,
                "cursor": cursor,
                "counters": asdict(counters),
                "ledger": ledger.to_dict(),
                "live_version": live_version,
                "target_revision": target_revision,
                "steps": learner.steps,
                "updates": learner.updates,
                "reservoir_seen": learner.reservoir.seen,
            }
            files.write_json(folder / "state.json", values)
        for older in self.numbers()[:-1]:
            shutil.rmtree(self.root / f"state-{older:08d}", ignore_errors=True)

    def restore(self, learner: Learner, *, target_revision: str) -> Restored | None:
        """Fills `learner`; None when there is no state that fits, which is then said in one line."""
        for number in reversed(self.numbers()):
            folder = self.root / f"state-{number:08d}"
            try:
                return self._restore(folder, learner, target_revision)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                logger.warning("learner state %s cannot be used (%s); starting without it", folder, str(error).splitlines()[0])
        return None

    def _restore(self, folder: Path, learner: Learner, target_revision: str) -> Restored:
        values: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if values["schema"] != SCHEMA_VERSION:
            raise ValueError(f"schema {values['schema']}, this is {SCHEMA_VERSION}")
        if values["target_revision"] != target_revision:
            raise ValueError("it learned for other weights of the target")
        tables = {name: _records(folder / f"{name}.parquet") for name in ("open", "fresh", "window", "reservoir")}
        counters, ledger = Counters(**values["counters"]), Ledger.from_dict(values["ledger"])
        _load_tensors(learner, folder)
        learner.steps, learner.updates = values["steps"], values["updates"]
        learner.reservoir.texts = _texts(tables["reservoir"])
        learner.reservoir.seen = values["reservoir_seen"]
        traffic = TrafficState(tables["open"], _texts(tables["fresh"]), _texts(tables["window"]))
        return Restored(values["cursor"], counters, ledger, values["live_version"], traffic)

    def _sweep(self) -> None:
        """What a kill left half-written."""
        if self.root.is_dir():
            for leftover in self.root.glob(".state-*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)


def trained(learner: Learner) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in learner.drafter.named_parameters() if parameter.requires_grad}


def _save_tensors(learner: Learner, folder: Path) -> None:
    parameters = trained(learner)
    save_file(
        {name: value.detach().cpu().clone().contiguous() for name, value in parameters.items()}, folder / "candidate.safetensors"
    )
    moments = {}
    for name, parameter in parameters.items():
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            moments[f"{name}:{key}"] = value.detach().cpu().clone().contiguous()
    save_file(moments, folder / "optimizer.safetensors")


def _load_tensors(learner: Learner, folder: Path) -> None:
    """All or nothing: every tensor is checked before the first is copied."""
    weights, moments = load_file(folder / "candidate.safetensors"), load_file(folder / "optimizer.safetensors")
    parameters = trained(learner)
    if {name: value.shape for name, value in weights.items()} != {name: value.shape for name, value in parameters.items()}:
        raise ValueError("its candidate has another shape than the live draft")
    if not all(bool(torch.isfinite(value).all()) for value in weights.values()):
        raise ValueError("its candidate has weights that are not finite")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    for key, value in moments.items():
        name, _, moment = key.rpartition(":")
        place = "cpu" if moment == "step" else parameters[name].device
        learner.optimizer.state.setdefault(parameters[name], {})[moment] = value.to(place)


def _flat(texts: Sequence[ServedText]) -> list[RoundRecord]:
    return [record for text in texts for record in text.records]


def _records(path: Path) -> list[RoundRecord]:
    return record_table.from_table(pq.read_table(path))


def _texts(records: Sequence[RoundRecord]) -> list[ServedText]:
    """Consecutive records of one request are one text; a new text begins with round 0."""
    groups: list[list[RoundRecord]] = []
    for record in records:
        if record.round == 0 or not groups:
            groups.append([])
        groups[-1].append(record)
    return [text for group in groups if (text := stitch(group)) is not None]
