"""Options of one request that a client of another engine sends beside its sampling parameters.

In vLLM they stand in `vllm_xargs`: `{"draftsmith_record": false, "draftsmith_class": "code",
"draftsmith_share": 0.1}`. A value of the wrong type is no reason to refuse a request: the request
is not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FALSE = ("false", "off", "no", "0")


@dataclass(frozen=True)
class EngineRequestOptions:
    record: bool = True
    request_class: str = ""
    share: float | None = None  # None: the engine's own share


def request_options(extra: Mapping[str, Any] | None) -> EngineRequestOptions:
    """Options among the free arguments of a request."""
    given = extra or {}
    record, share = given.get("draftsmith_record", True), given.get("draftsmith_share")
    if isinstance(record, str):
        record = record.strip().lower() not in FALSE
    try:
        number = None if share is None else float(share)
    except (TypeError, ValueError):
        return EngineRequestOptions(record=False)
    if number is not None and not 0 <= number <= 1:
        return EngineRequestOptions(record=False)
    return EngineRequestOptions(bool(record), str(given.get("draftsmith_class", "")), number)
