"""Construction of an engine from its configuration."""

from __future__ import annotations

from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.serve.cache.blocks import BlockManager
from draftsmith.serve.cache.memory import BlockPlan, most_tapped
from draftsmith.serve.cache.prefix import PrefixCache
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.auto import AutoControl
from draftsmith.serve.control.control import Control, FixedControl, ScheduledControl, parse_schedule
from draftsmith.serve.control.trees import TreeControl
from draftsmith.serve.engine.trees import wanted_tree


def control_of(config: EngineConfig) -> Control:
    if config.k_schedule is not None:
        return ScheduledControl(parse_schedule(config.k_schedule))
    if not config.adaptive:
        return FixedControl()
    tree = wanted_tree(config)
    return AutoControl(min(3, config.k)) if tree is None else TreeControl(tree.depth)


def prefix_cache(
    target: Target, drafter: ServingDrafter | None, blocks: BlockManager, plan: BlockPlan
) -> PrefixCache:
    if drafter is None:
        return PrefixCache(blocks, root=target.revision)
    # A drafter that cannot hold the newest position before it knows the next token keeps there what
    # depends on that token.
    ahead = max(0, 2 - drafter.cached_after(1, 0, 0))
    most = most_tapped(target, drafter, plan, blocks.block_size)
    return PrefixCache(
        blocks, root=target.revision, ahead=ahead, needs_taps=bool(drafter.taps), max_tapped=most
    )
