"""Progress of learning for the dashboard: versions with their gates, decisions, the learner's
status, the buffer's size; and the rows of the served drafts.

Read from files alone, because `serve` does not import `distill`; empty for a server that does not
learn.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.drafters.published.pool import DraftPool, pool_root, read_pool
from draftsmith.drafters.published.versions import (
    DECISIONS,
    latest,
    read_decisions,
    read_manifest,
    versions,
)
from draftsmith.errors import UserError
from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.serve.dashboard.samples import Counts
from draftsmith.serve.requests.route import CANARY, class_draft, shown
from draftsmith.serve.stats import EngineStats

STATUS = "status.json"
DECISIONS_SHOWN = 60
VERSIONS_SHOWN = 16
BUFFER_LOOK_S = 10.0  # listing a large folder is not free
# What an operator should look at; everything else is the learner's daily work.
ALARMS = ("refuse", "rolled back", "drift", "quarantine")


@dataclass
class Learning:
    """Reader of the versions folder and the buffer. `read` may be called from any thread; files
    that cannot change are read once."""

    versions: str | None = None  # the folder that the server follows
    buffer: str | None = None  # where rounds are recorded
    _manifests: dict[int, dict[str, Any]] = field(default_factory=dict)
    # with what was seen
    _decisions: dict[Path, tuple[tuple[int, int], list[dict[str, Any]]]] = field(
        default_factory=dict
    )
    _buffer: tuple[float, dict[str, Any] | None] = (-math.inf, None)

    def read(self) -> dict[str, Any]:
        decisions = self._read_decisions()
        return {
            "versions": self._read_versions(),
            "decisions": decisions,
            "alarms": [one for one in decisions if str(one.get("decision", "")).startswith(ALARMS)],
            "learner": self._read_status(),
            "buffer": self._read_buffer(),
        }

    def _read_versions(self) -> list[dict[str, Any]]:
        if self.versions is None:
            return []
        try:
            present, live = versions(self.versions)[-VERSIONS_SHOWN:], latest(self.versions)
        except (OSError, UserError):
            # A shared folder may be away for a moment; the watcher logs it.
            return []
        manifests = [self._manifest(version) for version in present]
        keys = ("version", "parent", "family", "created_s", "gate")
        return [
            {key: one.get(key) for key in keys} | {"live": one["version"] == live}
            for one in manifests
            if one
        ]

    def _manifest(self, version: int) -> dict[str, Any]:
        assert self.versions is not None
        if version not in self._manifests:
            try:
                self._manifests[version] = finite(read_manifest(self.versions, version))
            except (OSError, UserError):
                # Pruned since it was listed, or damaged; the watcher logs it.
                return {}
        return self._manifests[version]

    def _read_decisions(self) -> list[dict[str, Any]]:
        """Latest decisions about any draft, oldest first; one about a class's draft names the
        class."""
        if self.versions is None:
            return []
        classes = self._class_folders(self.versions)
        found = self._decisions_in(Path(self.versions))
        for name, folder in classes.items():
            found = found + [{"class": name, **one} for one in self._decisions_in(folder)]
        kept = {Path(self.versions), *classes.values()}
        self._decisions = {
            folder: seen for folder, seen in self._decisions.items() if folder in kept
        }
        return sorted(found, key=lambda one: one.get("time_s") or 0.0)[-DECISIONS_SHOWN:]

    def _class_folders(self, root: str) -> dict[str, Path]:
        """Folders of the classes that have a draft now, by class."""
        try:
            pool = read_pool(root) or DraftPool()
        except (OSError, UserError):
            # The watcher logs it.
            return {}
        return {
            name: pool_root(root) / folder
            for name, folder in {**pool.classes, **pool.learning}.items()
        }

    def _decisions_in(self, folder: Path) -> list[dict[str, Any]]:
        try:
            state = (folder / DECISIONS).stat()
        except OSError:
            return []
        signature = (state.st_size, state.st_mtime_ns)
        if folder not in self._decisions or signature != self._decisions[folder][0]:
            self._decisions[folder] = (signature, finite(read_decisions(folder)[-DECISIONS_SHOWN:]))
        return self._decisions[folder][1]

    def _read_status(self) -> dict[str, Any] | None:
        if self.versions is None:
            return None
        try:
            status = json.loads((Path(self.versions) / STATUS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(status, dict):
            return None
        return finite(status) | {"age_s": max(0.0, time.time() - status.get("time_s", 0.0))}

    def _read_buffer(self) -> dict[str, Any] | None:
        """Size of a local folder; an object store is not asked."""
        if self.buffer is None or "://" in self.buffer:
            return None
        read_s, size = self._buffer
        if time.monotonic() - read_s > BUFFER_LOOK_S:
            size = shards(self.buffer)
            self._buffer = (time.monotonic(), size)
        return size


def shards(folder: str) -> dict[str, Any]:
    count, size = 0, 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".parquet"):
                    count, size = count + 1, size + entry.stat().st_size
    except OSError:
        # Not there before the first record; the retention may delete what is being listed.
        pass
    return {"shards": count, "bytes": size}


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None: JSON for browsers has neither."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def drafts(
    stats: EngineStats, canary_share: float, learner: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """One row per draft, the live one first; then the classes that the learner has and this server
    has no draft for. `learner` is its status."""
    pool = (learner or {}).get("pool") or {}
    notes = {class_draft(name): note(status) for name, status in pool.items()}
    notes[CANARY] = f"on trial, {100 * canary_share:.0f} % of the requests"
    served = stats.draft_versions
    rows = [row(stats, draft, version, notes.get(draft, "")) for draft, version in served.items()]
    return rows + [
        row(stats, draft, "", notes[draft])
        for draft in map(class_draft, pool)
        if draft not in served
    ]


def row(stats: EngineStats, draft: str, version: str, note: str) -> dict[str, Any]:
    routed = dict(stats.routed)
    requests, total = routed.get(draft, 0), sum(routed.values())
    return {
        "draft": shown(draft),
        "version": version,
        "requests": requests,
        "share": requests / total if total else None,
        "note": note,
        **Counts.of(stats.by_version.get(version, AcceptanceCounts())).rates(),
    }


def note(status: Mapping[str, Any]) -> str:
    """Line about a class from the learner's status of it."""
    learned = f"{status.get('requests', 0)} requests, {status.get('updates', 0)} updates"
    if not status.get("serving"):
        return f"learns: {learned}"
    gain = status.get("gain")
    return learned if gain is None else f"gain {gain:+.4f}, {learned}"
