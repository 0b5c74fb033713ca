"""Bounds of the options of `generate` and `distill`, one table for all. Torch-free."""

from __future__ import annotations

import math
from typing import Any

from draftsmith import config as configuration
from draftsmith.config import (
    AT_LEAST_1,
    BELOW_1,
    INSIDE,
    NOT_NEGATIVE,
    POSITIVE,
    Limits,
    LimitsTable,
)
from draftsmith.distill.config import (
    DistillConfig,
    DriftConfig,
    GateConfig,
    GenerateOptions,
    LearnConfig,
    LearnUnroll,
    MonitorConfig,
    PoolConfig,
    RetentionConfig,
)
from draftsmith.drafters.options import LoraOptions

LIMITS: LimitsTable = {
    GenerateOptions: {
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
        "memory_gib": POSITIVE,
        "shard": AT_LEAST_1,
    },
    LearnConfig: {
        "lr": POSITIVE,
        "warmup_steps": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "max_grad_norm": Limits(0, math.inf, "[]"),
        "batch": AT_LEAST_1,
        "steps": AT_LEAST_1,
        "fresh": AT_LEAST_1,
        "replay": BELOW_1,
        "reservoir": AT_LEAST_1,
        "taps_gib": POSITIVE,
        "branches": NOT_NEGATIVE,
        "proximal": NOT_NEGATIVE,
        "average": BELOW_1,
        "budget": Limits(0, 1, "(]"),
        "max_length": AT_LEAST_1,
    },
    LearnUnroll: {"steps": AT_LEAST_1, "decay": Limits(0, 1, "[]")},
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
    MonitorConfig: {"false_alarm": INSIDE},
    PoolConfig: {"most": NOT_NEGATIVE, "requests": AT_LEAST_1, "idle_requests": AT_LEAST_1},
    RetentionConfig: {
        # Below the size of a few shards, unread records would be deleted.
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
    """Raises a `UserError` for the first number out of its limits."""
    configuration.check_numbers(config, LIMITS, prefix)
