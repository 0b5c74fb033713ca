"""Registry of the trained families: a new one is a file with a class and a line here.

Drafters that match text need no checkpoint and are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.drafters.blocks.dflash import Dflash
from draftsmith.drafters.blocks.dspark import Dspark
from draftsmith.drafters.heads.eagle1 import Eagle1
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.heads.medusa import Medusa
from draftsmith.drafters.heads.mlp import Mlp
from draftsmith.drafters.heads.mtp import Mtp
from draftsmith.drafters.heads.peagle import Peagle
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.target.target import Target

FAMILIES: dict[str, type[TrainedDrafter]] = {
    "eagle3": Eagle3,
    "p-eagle": Peagle,
    "mtp": Mtp,
    "draft-lm": DraftLm,
    "eagle1": Eagle1,
    "medusa": Medusa,
    "mlp": Mlp,
    "dflash": Dflash,
    "dspark": Dspark,
}
# The first that matches a config is its family: P-EAGLE is EAGLE-3 with further keys, a draft LM
# may be any model.
MATCH_ORDER = (
    "p-eagle",
    "eagle3",
    "mtp",
    "eagle1",
    "medusa",
    "mlp",
    "dflash",
    "dspark",
    "draft-lm",
)


def family_of(config: Mapping[str, Any], target: Target | None = None) -> str:
    """Family of a folder without our record, by its `config.json`."""
    return next(name for name in MATCH_ORDER if FAMILIES[name].matches(config, target))
