"""Number of blocks in the paged pools, the longest request that they allow, and the states of a
target's recurrent layers beside them."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.quirks.kept_state import NUM_SIDES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.dispatch import pins
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.config_checks import check_engine

log = logging.getLogger(__name__)
GIB = 2**30
CPU_BYTES = 2 * GIB
# Of what a GPU has left when the weights are there: the rest is for activations, taps and graphs.
GPU_SHARE = 0.8
# Bounds of `most_kept`: more would cost a draft that comes back longer than it may bring, fewer
# would not outlast a short rest.
FEWEST_UNREAD, MOST_UNREAD = 64, 1024


class BlockPlan(NamedTuple):
    num_blocks: int  # the null block included
    max_length: int  # most tokens of prompt and answer together
    block_bytes: int  # of one block in both pools: target and draft share block ids


def plan_blocks(target: Target, drafter: ServingDrafter | None, config: EngineConfig) -> BlockPlan:
    """`num_blocks` if given; else enough for a full batch of full contexts, target's and draft's,
    within `memory_gib`."""
    check_engine(config)
    max_length = served_length(target, config)
    num_blocks, each = config.num_blocks, block_bytes(target, drafter, config.block_size)
    if num_blocks is None:
        wanted = config.max_batch * -(-max_length // config.block_size) + 1
        allowed = (
            allowed_bytes(target.device)
            if config.memory_gib is None
            else int(config.memory_gib * GIB)
        )
        allowed -= state_bytes(target, config)
        # A block of a model without attention takes nothing.
        num_blocks = min(wanted, allowed // each) if each else wanted
    if num_blocks < 2:
        given = (
            f"num_blocks is {num_blocks}"
            if config.memory_gib is None
            else f"memory_gib is {config.memory_gib:g}"
        )
        raise UserError(f"{given}, too little for two blocks of keys and values; give more")
    return BlockPlan(num_blocks, min(max_length, (num_blocks - 1) * config.block_size), each)


def served_length(target: Target, config: EngineConfig) -> int:
    """Most tokens of prompt and answer. A target that is right for a part of its own length only
    must be given that part."""
    longest = target.num_positions
    limit = target.rope_limit
    if limit is not None and config.max_length is None and target.max_positions < longest:
        raise UserError(
            f"{limit.reason(target.name)}, so its longest text must be given: "
            f"{limit.choice(longest)}"
        )
    if config.max_length is None:
        return longest
    target.check_length(config.max_length, "max_length")
    if not 2 <= config.max_length <= longest:
        raise UserError(f"max_length is {config.max_length}; this target allows 2 to {longest}")
    return config.max_length


def block_bytes(target: Target, drafter: ServingDrafter | None, block_size: int) -> int:
    """Bytes of one block in both pools, measured on pools of one block."""
    own = None if drafter is None else drafter.new_pool(1, block_size, target.device, target.dtype)
    return target.new_pool(1, block_size).num_bytes + (0 if own is None else own.num_bytes)


def most_tapped(target: Target, drafter: ServingDrafter, plan: BlockPlan, block_size: int) -> int:
    """Cached blocks that may carry taps: these take an eighth of what the pools do at most."""
    tap_bytes = len(drafter.taps) * target.hidden_size * target.dtype.itemsize * block_size
    return plan.num_blocks * plan.block_bytes // (8 * max(tap_bytes, 1))


def most_kept(
    target: Target, drafter: ServingDrafter, plan: BlockPlan, config: EngineConfig
) -> int:
    """Tokens of an answer whose taps a request may keep for a draft that does not come: a full
    batch's take what the cached ones may."""
    tokens = most_tapped(target, drafter, plan, config.block_size) * config.block_size
    return max(FEWEST_UNREAD, min(MOST_UNREAD, tokens // config.max_batch))


def allowed_bytes(device: torch.device) -> int:
    """Most bytes of the pools where no option gives them."""
    return int(GPU_SHARE * torch.cuda.mem_get_info(device)[0]) if pins(device) else CPU_BYTES


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
