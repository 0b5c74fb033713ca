"""Every trained family by name: a new one is a file with a class and a line here. N-gram matching needs no checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.drafters.draft_lm import DraftLm
from draftsmith.drafters.eagle3 import ARCHITECTURES as EAGLE3_ARCHITECTURES
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.mtp import Mtp

FAMILIES: dict[str, type[TrainedDrafter]] = {"eagle3": Eagle3, "mtp": Mtp, "draft-lm": DraftLm}


def family_of(config: Mapping[str, Any]) -> str:
    """The family of a folder without our record, by the architecture its `config.json` names."""
    architectures = config.get("architectures") or ["unknown"]
    return "eagle3" if architectures[0] in EAGLE3_ARCHITECTURES else "draft-lm"
