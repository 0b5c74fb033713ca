"""Records of rounds that say only what a test is about."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from draftsmith.distill.buffer import record_table
from draftsmith.distill.buffer.traffic import ServedText, stitch
from draftsmith.record import RoundRecord


def round_record(**changes: Any) -> RoundRecord:
    """The first round of a request, behind one token and without drafts; `emitted` is the last
    committed token."""
    committed = changes.get("committed", [])
    values: dict[str, Any] = {
        "request": "r", "round": 0, "request_class": "", "target": "t", "target_revision": "",
        "draft_version": "1", "time_s": 0.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
        "min_p": 0.0, "position": 1, "context": [1], "drafted": [], "accepted": 0,
        "committed": committed, "emitted": committed[-1] if committed else -1,
    }  # fmt: skip
    return RoundRecord(**{**values, **changes})


def served_text(records: Iterable[RoundRecord]) -> ServedText:
    text = stitch(records)
    assert text is not None
    return text


def file_of(records: Sequence[RoundRecord]) -> bytes:
    """Bytes of a Parquet file."""
    data = io.BytesIO()
    record_table.write(record_table.to_table(records), data)
    return data.getvalue()
