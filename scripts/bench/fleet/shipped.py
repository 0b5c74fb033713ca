"""The target and the EAGLE-3 draft that ship, the target in float32."""

from __future__ import annotations

from pathlib import Path

from scripts.demo.ship_draft import SHIPPED_DRAFT
from scripts.demo.stages import SHIPPED_TARGET, unpack


def shipped_pair(folder: Path) -> tuple[Path, Path]:
    """Target, made in `folder`, and draft."""
    if not (folder / "target").exists():
        unpack(SHIPPED_TARGET, folder / "target")
    return folder / "target", SHIPPED_DRAFT
