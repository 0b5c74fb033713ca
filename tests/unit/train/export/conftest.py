"""Targets whose own kind has an MTP module, and drafts whose weights no default gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

APPENDED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
Find = Callable[..., str]
FindNative = Callable[[str], Path]


@pytest.fixture
def without_module(tiny_target: Find, native_target: FindNative) -> Callable[[str], Path]:
    """Folder of a target of the kind that has lost its module, as fine-tunes do."""
    return lambda kind: (
        native_target(kind) / "whole" if kind in APPENDED else Path(tiny_target(kind))
    )
