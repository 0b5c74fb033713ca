"""States of a target's recurrent layers beside the paged pool: their memory, and what cannot be had
with them."""

from __future__ import annotations

import logging

from draftsmith.drafters.recurrent.kept import NUM_SIDES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig

log = logging.getLogger(__name__)


def state_bytes(target: Target, config: EngineConfig) -> int:
    """Bytes of the states of a full batch."""
    return NUM_SIDES * config.max_batch * target.state_layers.num_bytes


def check_states(target: Target, config: EngineConfig) -> None:
    """Raises `UserError` for options that a target with states cannot have."""
    if not target.state_layers:
        return
    if config.tree is not None:
        raise UserError(
            f"tree is {config.tree!r}, but {target.name!r} has layers with a recurrent state, "
            "which reads one continuation only; leave tree out"
        )
    if config.prefix_cache:
        log.info(
            "prefix caching is off: %s has layers with a recurrent state, which is not kept at "
            "the ends of blocks",
            target.name,
        )


def caches(target: Target, config: EngineConfig) -> bool:
    """True where beginnings of texts are found again."""
    return config.prefix_cache and not target.state_layers
