"""Messages from an engine to its writer through the ring.

Legend: r requests of a step, n drafted positions, V vocabulary. Requests are named by handles,
numbers that are never used again.
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np

# The writer process, whose job is `EngineJob`. A new one has no request of the one before, whose
# `generation` is another.
WRITER = "draftsmith.fleet.recording.writer"
Meta = TypeVar("Meta")


class MessageKind(IntEnum):
    """Kind of a message; its number and its arrays."""

    # handle; meta (`RequestMeta` as JSON), prompt
    BEGIN = 0
    # step; meta (`StepMeta`), handles [r], counts of drafted tokens [r], drafted [n], then p and q
    # as `StepMeta` says
    POSITIONS = 1
    # step; handles [r], counts of sampled tokens [r], sampled tokens, all requests' after another
    TOKENS = 2
    # 0; handles
    END = 3
    # handle; all tokens with which a preempted request goes on
    RESUME = 4


class RequestMeta(NamedTuple):
    """Properties of a request that its records need."""

    id: str
    request_class: str
    share: float
    temperature: float
    top_k: int  # 0 for none
    top_p: float
    min_p: float
    seeded: bool
    adjusts: bool  # sampled by more than the four numbers above: no p and q
    max_tokens: int
    stops: list[int]  # tokens that end it

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class StepMeta(NamedTuple):
    """Meaning of the arrays behind the first three of `POSITIONS`.

    With `dtype` they are p [n, V], raw logits of that torch dtype, and q [n, V] or [0, 0]. Without,
    they are ids [n, 64], logprobs [n, 64] and tail, log norm, drafted [n, 3] of p, then the same of
    q or nothing. No q is a q that is one-hot.
    """

    draft_version: str
    weight_version: str
    dtype: str = ""
    q_is_probs: bool = False


def meta_array(meta: tuple[Any, ...]) -> np.ndarray:
    return np.frombuffer(json.dumps(list(meta)).encode(), np.uint8)


def read_meta(cls: type[Meta], array: np.ndarray) -> Meta:
    return cls(*json.loads(array.tobytes()))
