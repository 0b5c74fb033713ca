"""Options of `draftsmith doctor`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.api_key import API_KEY_HELP
from draftsmith.config import AT_LEAST_1, NOT_NEGATIVE, Limits, option
from draftsmith.drafters.config import OFFLOAD_HELP, OFFLOADS, Pair


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Pair):
    target: str | None = option(
        None, "folder or Hub id of the target [default: the one that the data names]"
    )
    data: tuple[str, ...] = option((), "generated datasets to check against both")
    rows: int = option(256, "rows of the data to read, spread over all of it", limits=AT_LEAST_1)
    show: int = option(
        2,
        "rows of the data to print whole, trained tokens in colour, or in [[ ]] where there is "
        "none",
        limits=NOT_NEGATIVE,
    )
    max_length: int = option(
        2048, "training length in tokens beyond which a row is cut", limits=Limits(2)
    )
    sequences: int = option(
        8, "concurrent sequences that the memory estimate assumes", limits=AT_LEAST_1
    )
    target_shares: int = option(
        1,
        "processes that hold one copy of the target between them, under a launcher, as in train",
        limits=AT_LEAST_1,
    )
    target_offload: str | None = option(None, OFFLOAD_HELP, choices=OFFLOADS)
    url: str | None = option(
        None, "instead of a target: a running draftsmith server, for example http://127.0.0.1:8000"
    )
    seconds: float = option(
        0.0,
        "watch the server for so long; 0: all it has done since it started",
        limits=Limits(0, 3600, "[]"),
    )
    api_key: str | None = option(None, API_KEY_HELP)
    json: bool = option(False, "print the findings as JSON")
