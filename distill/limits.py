"""Between which numbers the options of `generate` and `distill` lie: beyond them no run does what
it is there for. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from draftsmith.distill.config import (
    DistillConfig,
    DriftConfig,
    GateConfig,
    GenerateConfig,
    LearnConfig,
    PoolConfig,
    RetentionConfig,
)
from draftsmith.drafters.options import LoraOptions
from draftsmith.errors import UserError


class Limits(NamedTuple):
    low: float
    high: float = math.inf
    ends: str = "[)"  # of the interval, as mathematics writes them

    def hold(self, value: float) -> bool:
        """Never NaN."""
        is_above = value >= self.low if self.ends[0] == "[" else value > self.low
        return is_above and (value <= self.high if self.ends[1] == "]" else value < self.high)

    def __str__(self) -> str:
        told = f"{'at least' if self.ends[0] == '[' else 'above'} {self.low}"
        if math.isinf(self.high):
            return told
        return f"{told} and {'at most' if self.ends[1] == ']' else 'below'} {self.high}"


AT_LEAST_1, NOT_NEGATIVE, POSITIVE = Limits(1), Limits(0), Limits(0, ends="()")
INSIDE, BELOW_1 = Limits(0, 1, "()"), Limits(0, 1)

LIMITS: Mapping[type, Mapping[str, Limits]] = {
    GenerateConfig: {
        "count": AT_LEAST_1,
        "prompt_tokens": AT_LEAST_1,
        "max_tokens": AT_LEAST_1,
        "temperature": NOT_NEGATIVE,
        "top_k": NOT_NEGATIVE,
        "top_p": Limits(0, 1, "(]"),
        "seed": NOT_NEGATIVE,
        "held_out": Limits(0, 1, "[]"),
        "top_logprobs": NOT_NEGATIVE,
        "batch": AT_LEAST_1,
        "shard": AT_LEAST_1,
    },
    LearnConfig: {
        "lr": POSITIVE,
        "warmup": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "clip": Limits(0, math.inf, "(]"),
        "batch": AT_LEAST_1,
        "steps": AT_LEAST_1,
        "fresh": AT_LEAST_1,
        "replay": BELOW_1,
        "reservoir": AT_LEAST_1,
        "branches": NOT_NEGATIVE,
        "unroll": AT_LEAST_1,
        "step_decay": Limits(0, 1, "[]"),
        "proximal": NOT_NEGATIVE,
        "average": BELOW_1,
        "budget": Limits(0, 1, "(]"),
        "max_length": AT_LEAST_1,
    },
    LoraOptions: {"rank": AT_LEAST_1, "alpha": POSITIVE},
    GateConfig: {
        "every": AT_LEAST_1,
        "requests": AT_LEAST_1,
        "window": AT_LEAST_1,
        "held_out": INSIDE,
        "error": INSIDE,
        "gain": BELOW_1,
        "drop": BELOW_1,
        "canary": Limits(0, 0.5, "[]"),
        "canary_requests": AT_LEAST_1,
        "floor": Limits(0, 1, "[]"),
    },
    DriftConfig: {"false_alarms": POSITIVE, "drop": BELOW_1, "patience": NOT_NEGATIVE},
    PoolConfig: {"most": NOT_NEGATIVE, "requests": AT_LEAST_1, "idle_requests": AT_LEAST_1},
    RetentionConfig: {
        # Below the size of a few shards, what nobody has read yet would be deleted.
        "bytes": Limits(1 << 20),
        "age_s": Limits(0, math.inf, "[]"),
        "versions": NOT_NEGATIVE,
    },
    DistillConfig: {
        "poll_s": POSITIVE,
        "save_s": NOT_NEGATIVE,
        "until_idle_s": NOT_NEGATIVE,
        "max_updates": NOT_NEGATIVE,
        "threads": AT_LEAST_1,
        "status_port": Limits(0, 2**16),
        "tpot_ms": POSITIVE,
    },
}


def check_numbers(config: Any, prefix: str = "") -> None:
    """Of a configuration and of those in it; an option that is not given has no bounds."""
    limits = LIMITS.get(type(config), {})
    for field in fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if type(value) in LIMITS:
            check_numbers(value, f"{name}.")
        elif value is not None and field.name in limits and not limits[field.name].hold(value):
            finite = " and finite" if value == math.inf else ""
            raise UserError(f"{name} is {value}; it must be {limits[field.name]}{finite}")
