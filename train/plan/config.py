"""Options of `draftsmith plan`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.config import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, option
from draftsmith.drafters.config import OFFLOAD_HELP, OFFLOADS, SAMPLINGS, TRUST_HELP
from draftsmith.train.config import DRAFT_SAMPLING_HELP, FamilyShapes


@dataclass(frozen=True, kw_only=True)
class PlanConfig(FamilyShapes):
    target: str = option(help="the target: a folder, Hub id or GGUF file of a causal LM")
    data: tuple[str, ...] = option(
        (),
        "folders written by `draftsmith generate`, FOLDER[:WEIGHT]: their tokens size the run and "
        "the draft vocabulary",
    )
    draft: tuple[str, ...] = option(
        (),
        "trained drafts whose recorded acceptance counts for their family (`eval --store`); "
        "several of a family are planned each",
    )
    alpha: tuple[str, ...] = option(
        (), "expected acceptance of a family, FAMILY:ALPHA_1[,ALPHA_2...] (the last one goes on)"
    )
    families: tuple[str, ...] = option((), "families to consider [default: all that train]")
    temperature: float = option(
        1.0, "temperature whose recorded acceptance is taken", limits=NOT_NEGATIVE
    )
    draft_sampling: str = option("sampled", DRAFT_SAMPLING_HELP, choices=SAMPLINGS)
    k: int = option(8, "longest draft considered", limits=AT_LEAST_1)
    streams: tuple[int, ...] = option(
        (1, 8), "numbers of requests served at once to plan for", limits=AT_LEAST_1
    )
    context: int = option(
        512,
        "tokens of a request before the round that is timed, fewer where the target ends earlier",
        limits=AT_LEAST_1,
    )
    answers: int = option(50000, "answers to train on, where no data is given", limits=AT_LEAST_1)
    tokens: int = option(512, "tokens of an answer, where no data is given", limits=AT_LEAST_1)
    epochs: float = option(1.0, "passes over the data", limits=POSITIVE)
    target_shares: int = option(
        1,
        "processes that hold one copy of the target between them, as in train: the memory of each; "
        "started under a launcher, training is timed with such shares",
        limits=AT_LEAST_1,
    )
    target_offload: str | None = option(None, OFFLOAD_HELP, choices=OFFLOADS)
    data_curve: bool = option(
        False,
        "train one family on 1/8, 1/4, 1/2 and all of the data, as many epochs each, and "
        "extrapolate: does more data pay",
    )
    out: str | None = option(
        None, "folder of the drafts of --data-curve; a killed run goes on from it"
    )
    recipe: str | None = option(
        None, "recipe of `train` for these drafts; its steps, minutes and epochs are left out"
    )
    prompts: int = option(
        256, "held-out prompts that these drafts are evaluated on at most", limits=AT_LEAST_1
    )
    trust_remote_code: bool = option(False, TRUST_HELP)
    json: bool = option(False, "print JSON instead of a table")
