"""The round record: what the engine hands to a sink after every round, and the buffer's row. Torch-free, schema-versioned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

SCHEMA_VERSION = 1
TOP = 64


@dataclass(slots=True)
class Law:
    """One categorical law as its `TOP` likeliest tokens; never renormalised: exp(logprobs).sum() + tail == 1."""

    ids: list[int]
    logprobs: list[float]
    tail: float  # probability outside `ids`


@dataclass(slots=True)
class RoundRecord:
    """One propose -> verify -> commit step of one request.

    The tokens of a request are, in order of `round`: `context` (tokens committed since the request's previous record; the
    whole prompt in the first one), then `committed`. `p[i]` and `q[i]` are the laws at drafted position i. They are left out
    when the request asked for more than the sampling fields below tell (a penalty, a ban, a grammar): what was accepted then
    says nothing about the laws under these fields, so such rounds are text to learn from and are never scored.
    """

    request: str  # hashed id, stable over the request's rounds
    round: int  # 0, 1, 2, ... within the request
    request_class: str  # "" when the client gave none
    target: str
    target_revision: str
    draft_version: str  # "" when no draft proposed
    time_s: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    position: int  # absolute position of the first drafted token
    context: list[int]
    drafted: list[int]
    accepted: int  # how many of `drafted` were kept before any trimming
    committed: list[int]  # what was emitted after stop and EOS trimming
    emitted: int  # the residual or bonus token
    p: list[Law] = field(default_factory=list)  # target law at temperature 1 without filters, per drafted position
    p_log_norm: list[float] = field(
        default_factory=list
    )  # log sum_v exp(logprob_v / temperature); 0.0 where temperature is 0 or 1
    q: list[Law] = field(default_factory=list)  # the law the draft token was sampled from; one-hot for deterministic drafts
    schema: int = SCHEMA_VERSION


class Sink(Protocol):
    """Takes records off the engine's thread; must never block and never raise into it."""

    def put(self, record: RoundRecord) -> None: ...

    def close(self) -> None: ...
