"""Options of `draftsmith doctor` and `draftsmith plan`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.config import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, Limits, option
from draftsmith.drafters.config import OFFLOAD_HELP, OFFLOADS, TRUST_HELP, Pair
from draftsmith.train.config import FAMILIES


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Pair):
    target: str | None = option(
        None, "folder or Hub id of the target [default: the one that the data names]"
    )
    data: tuple[str, ...] = option((), "generated datasets to check against both")
    rows: int = option(256, "rows of the data to read, spread over all of it", limits=AT_LEAST_1)
    show: int = option(
        2,
        "rows of the data to print whole, trained tokens in [[ ]]",
        limits=NOT_NEGATIVE,
    )
    max_length: int = option(
        2048, "training length in tokens beyond which a row is cut", limits=Limits(2)
    )
    sequences: int = option(
        8, "concurrent sequences that the memory estimate assumes", limits=AT_LEAST_1
    )
    target_offload: str | None = option(None, OFFLOAD_HELP, choices=OFFLOADS)
    url: str | None = option(
        None, "instead of all else: a running draftsmith server, http://127.0.0.1:8000"
    )
    json: bool = option(False, "print the findings as JSON")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    target: str = option(help="the target: a folder, Hub id or GGUF file of a causal LM")
    data: tuple[str, ...] = option(
        (),
        "folders written by `draftsmith generate`, FOLDER[:WEIGHT]: their tokens size the run and "
        "the draft vocabulary",
    )
    families: tuple[str, ...] = option(
        (), "families to plan [default: that of the recipe, or all]", choices=FAMILIES
    )
    recipe: str | None = option(
        None, "recipe of `train` whose batch, unroll and shape are planned; its length is not"
    )
    answers: int = option(50000, "answers to train on, where no data is given", limits=AT_LEAST_1)
    tokens: int = option(512, "tokens of an answer, where no data is given", limits=AT_LEAST_1)
    epochs: float = option(1.0, "passes over the data", limits=POSITIVE)
    target_offload: str | None = option(None, OFFLOAD_HELP, choices=OFFLOADS)
    trust_remote_code: bool = option(False, TRUST_HELP)
    json: bool = option(False, "print JSON instead of a table")
