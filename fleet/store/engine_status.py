"""Status of one engine, which its follower puts beside the versions: `engines/ID.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any
from urllib.parse import quote

from draftsmith.fleet.store.errors import StoreError
from draftsmith.fleet.store.layout import ENGINES, parse_json


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    engine: str
    version: int | None = None  # what it drafts with; None for a draft that is no version
    since_s: float = 0.0  # when it began to, in seconds since 1970
    alpha: float | None = None  # accepted of the drafted tokens reached, of that version
    tau: float | None = None
    tokens_per_s: float | None = None
    z: float | None = None  # of the losslessness monitor
    evidence: float | None = None  # log10 of the monitor's, against a lossless engine
    alarm: bool = False  # the evidence is enough
    digests: tuple[str, ...] = ()  # of what each rank has loaded, by rank
    refused: Mapping[int, str] = field(default_factory=dict)  # reason by version
    # {"version": ..., "pause_ms": ..., "ok": ...}
    last_swap: Mapping[str, Any] = field(default_factory=dict)
    at_s: float = 0.0  # when this status was made

    def to_json(self) -> bytes:
        values = {name: finite(value) for name, value in asdict(self).items()}
        values["refused"] = {str(version): reason for version, reason in self.refused.items()}
        return (json.dumps(values) + "\n").encode()


def parse_status(data: bytes) -> EngineStatus:
    """Keys that are not known are left out: engines of a fleet are upgraded one by one."""
    values = parse_json(data, "the status of an engine")
    known = {one.name for one in fields(EngineStatus)}
    try:
        read = {name: value for name, value in values.items() if name in known}
        refused = read.get("refused") or {}
        read["refused"] = {int(version): str(reason) for version, reason in refused.items()}
        read["digests"] = tuple(str(one) for one in read.get("digests") or ())
        read["at_s"] = float(read.get("at_s") or 0.0)
        return EngineStatus(**read)
    except (AttributeError, TypeError, ValueError) as error:
        raise StoreError(
            f"the status of engine {values.get('engine')!r} is of another form ({error})"
        ) from error


def finite(value: Any) -> Any:
    """None for NaN and infinity, which JSON has not."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def object_of(engine: str) -> str:
    """Name of an engine's status. Ids are often HOST:PORT."""
    return f"{ENGINES}/{quote(engine, safe=':@+=')}.json"
