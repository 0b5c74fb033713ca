"""Registry of the trained families: a new one is a file with a class and a line here.

Drafters that match text need no checkpoint and are not listed.
"""

from __future__ import annotations

from draftsmith.drafters.blocks.dflash import Dflash
from draftsmith.drafters.blocks.dspark import Dspark
from draftsmith.drafters.heads.eagle1 import Eagle1
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.heads.mtp import Mtp
from draftsmith.drafters.heads.peagle import Peagle
from draftsmith.drafters.interface import Family
from draftsmith.drafters.layouts.folder import DraftFolder, is_causal_lm
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.states.medusa import Medusa
from draftsmith.drafters.states.mlp import Mlp
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError

FAMILIES: dict[str, Family] = {
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
# The first that matches a config is its family: P-EAGLE is EAGLE-3 with further keys, an MTP
# module comes in the folder of a causal LM, and EAGLE-1 may bear the architecture of one.
MATCH_ORDER = (
    "p-eagle", "eagle3", "mtp", "medusa", "mlp", "dflash", "dspark", "eagle1", "draft-lm",
)  # fmt: skip
# `speculators_model_type` -> family.
SPECULATORS = {
    "eagle": "eagle1",
    "eagle3": "eagle3",
    "peagle": "p-eagle",
    "dflash": "dflash",
    "dspark": "dspark",
    "mtp": "mtp",
}


def family_of(draft: DraftFolder, target: Target | None = None) -> str:
    """Family of a folder without our record. Raises `UserError` for a draft of none."""
    if draft.speculators_type is not None:
        return speculators_family(draft)
    known = {*FAMILIES, *SPECULATORS}
    if draft.kind is not None and draft.kind not in known and not is_causal_lm(draft.config):
        raise UserError(
            f"draft {str(draft.path)!r} is a {draft.kind!r} under the architecture "
            f"{draft.architecture!r}, and draftsmith does not read such drafts; use another draft"
        )
    for name in MATCH_ORDER:
        if FAMILIES[name].matches(draft, target):
            return name
    raise UserError(
        f"draft {str(draft.path)!r} is of architecture {draft.architecture!r} (model_type "
        f"{draft.config.get('model_type')!r}), which is no draft that draftsmith reads and no "
        "causal LM of transformers; use another draft"
    )


def speculators_family(draft: DraftFolder) -> str:
    if draft.speculators_type not in SPECULATORS:
        raise UserError(
            f"draft {str(draft.path)!r} has speculators_model_type={draft.speculators_type!r}; "
            f"draftsmith reads {', '.join(SPECULATORS)}, so use a draft of one of these"
        )
    return SPECULATORS[draft.speculators_type]
