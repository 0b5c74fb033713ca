"""Every trained family by name: a new one is a file with a class and a line here. Matching of text
needs no checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.drafters.blocks.dflash import Dflash
from draftsmith.drafters.blocks.dspark import Dspark
from draftsmith.drafters.heads.eagle1 import ARCHITECTURES as EAGLE1_ARCHITECTURES
from draftsmith.drafters.heads.eagle1 import Eagle1
from draftsmith.drafters.heads.eagle3 import ARCHITECTURES as EAGLE3_ARCHITECTURES
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.heads.medusa import Medusa
from draftsmith.drafters.heads.mlp import Mlp
from draftsmith.drafters.heads.mtp import Mtp
from draftsmith.drafters.heads.mtp_deepseek import is_appended
from draftsmith.drafters.heads.mtp_mimo import ARCHITECTURE as NATIVE_MTP
from draftsmith.drafters.heads.peagle import ARCHITECTURES as PEAGLE_ARCHITECTURES
from draftsmith.drafters.heads.peagle import Peagle, drafts_in_parallel
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
BY_ARCHITECTURE = dict.fromkeys(EAGLE3_ARCHITECTURES, "eagle3") | dict.fromkeys(
    EAGLE1_ARCHITECTURES, "eagle1"
)
BY_ARCHITECTURE |= dict.fromkeys(PEAGLE_ARCHITECTURES, "p-eagle")
BY_ARCHITECTURE |= {
    Dflash.architecture: Dflash.family,
    Dspark.architecture: Dspark.family,
    NATIVE_MTP: Mtp.family,
}
BY_MODEL_TYPE = {"medusa": "medusa", "mlp_speculator": "mlp"}


def family_of(config: Mapping[str, Any], target: Target | None = None) -> str:
    """The family of a folder without our record, by what its `config.json` names; a smaller model
    of the target's kind is no module of the target's, though it has one of its own."""
    if "medusa_num_heads" in config:  # the original layout names nothing else
        return "medusa"
    if is_appended(config):
        of_target = target is None or config["num_hidden_layers"] == target.num_layers
        return Mtp.family if of_target else DraftLm.family
    architecture = (config.get("architectures") or ["unknown"])[0]
    if architecture in EAGLE3_ARCHITECTURES and drafts_in_parallel(config):
        return "p-eagle"
    return BY_ARCHITECTURE.get(architecture) or BY_MODEL_TYPE.get(
        config.get("model_type", ""), "draft-lm"
    )
