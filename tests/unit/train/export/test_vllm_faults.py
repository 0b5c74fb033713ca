"""The table of releases of vLLM that are not lossless, and the guide's."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.train.export.vllm_faults import FAULTS, Fault

GUIDE = Path(__file__).resolve().parents[4] / "docs/guides/vllm.md"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.issue))
def test_the_guide_has_the_same_releases(fault: Fault) -> None:
    rows = [line for line in GUIDE.read_text("utf-8").splitlines() if f"[#{fault.issue}]" in line]
    assert len(rows) == 1 and rows[0].startswith(f"| {fault.releases} |")
