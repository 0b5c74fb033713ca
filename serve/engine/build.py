"""Construction of an engine from its configuration."""

from __future__ import annotations

import logging

from draftsmith.drafters.compiled.captured import capture_forwards
from draftsmith.drafters.interface import Capturable, ServingDrafter, draft_positions
from draftsmith.drafters.quirks.kept_state import NUM_SIDES
from draftsmith.drafters.target.adapters import Adapters
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.cuda_graphs import CountedCapturer, CudaCapturer, GraphRoom
from draftsmith.kernels.dispatch import pins, reads_freely
from draftsmith.kernels.host_memory import keep_freed_memory
from draftsmith.record import Sink
from draftsmith.serve.cache.blocks import BlockManager
from draftsmith.serve.cache.memory import (
    BlockPlan,
    caches,
    check_states,
    most_kept,
    most_tapped,
    plan_blocks,
)
from draftsmith.serve.cache.prefix import PrefixCache
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.config_checks import configured_tree
from draftsmith.serve.control.auto import AutoControl, TreeControl
from draftsmith.serve.control.control import Control
from draftsmith.serve.engine.commit import Committer
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.graphs import PassGraphs
from draftsmith.serve.engine.live_draft import LiveDraft
from draftsmith.serve.engine.propose import Proposer
from draftsmith.serve.engine.recorder import RoundRecorder
from draftsmith.serve.engine.runner import BlockTables, TargetRunner
from draftsmith.serve.engine.scheduler import Scheduler
from draftsmith.serve.engine.verify import RULES, rule_name
from draftsmith.serve.requests.input_processor import InputProcessor
from draftsmith.serve.stats import EngineStats

log = logging.getLogger(__name__)


def build_engine(
    target: Target,
    drafter: ServingDrafter | None,
    config: EngineConfig,
    *,
    sink: Sink | None = None,
    draft_version: str = "",
    adapters: Adapters | None = None,
) -> EngineCore:
    """An engine with its pools, ready for requests. Raises `UserError` for options that do not go
    together.

    Args:
        drafter: None: no speculation.
        sink: takes the round records, None: nothing is recorded.
        draft_version: of `drafter`, in records and metrics.
        adapters: of `target`, which requests may ask for by name.
    """
    check_states(target, config)
    check_recorded_taps(drafter, config)
    if reads_freely(target.device):
        keep_freed_memory()
    if config.compile == "auto":
        capture_forwards(target, drafter)
    plan = plan_blocks(target, drafter, config)
    stats = EngineStats(draft_version=draft_version)
    tree = configured_tree(config)
    scheduler = _scheduler(target, drafter, config, plan)
    max_blocks = scheduler.blocks.blocks_for(plan.max_length) + 1
    warn_of_positions(drafter, plan.max_length)
    names = [] if adapters is None else adapters.names
    pool = None
    if drafter is not None:
        pool = drafter.new_pool(plan.num_blocks, config.block_size, target.device, target.dtype)
    captures = config.compile == "auto" and pins(target.device)
    draft_graphs = CountedCapturer(CudaCapturer(target.device)) if captures else None
    draft = LiveDraft(drafter, target, stats)
    proposer = Proposer(
        draft,
        pool,
        vocab_size=target.vocab_size,
        tree=tree,
        least_confidence=config.least_confidence,
        greedy=config.draft_sampling == "greedy",
    )
    if draft_graphs is not None and isinstance(drafter, Capturable):
        drafter.capture(GraphRoom(pool, config.max_batch, max_blocks, draft_graphs))
    runner = _runner(target, config, plan, proposer, max_blocks=max_blocks, adapters=adapters)
    rule = rule_name(config, trees=tree is not None)
    recorder = RoundRecorder(sink, target, config, rule=rule, taps=proposer.taps)
    kept = 0 if drafter is None else most_kept(target, drafter, plan, config)
    return EngineCore(
        target=target,
        config=config,
        max_length=plan.max_length,
        stats=stats,
        inputs=InputProcessor(
            target,
            k=config.k if tree is None else tree.nodes,
            has_drafter=drafter is not None,
            adapters=names,
            max_length=plan.max_length,
            seed=config.seed,
        ),
        scheduler=scheduler,
        tables=BlockTables(config.max_batch, max_blocks, target.device),
        draft=draft,
        proposer=proposer,
        runner=runner,
        draft_graphs=draft_graphs,
        rule=RULES[rule],
        recorder=recorder,
        adapters=names,
        committer=Committer(target, scheduler, proposer, recorder, most_kept=kept),
    )


def _scheduler(
    target: Target, drafter: ServingDrafter | None, config: EngineConfig, plan: BlockPlan
) -> Scheduler:
    blocks = BlockManager(plan.num_blocks, config.block_size)
    return Scheduler(
        blocks,
        config,
        prefix=prefix_cache(target, drafter, blocks, plan) if caches(target, config) else None,
        control=control_of(config),
        draft_positions=draft_positions(drafter),
    )


def _runner(
    target: Target,
    config: EngineConfig,
    plan: BlockPlan,
    proposer: Proposer,
    *,
    max_blocks: int,
    adapters: Adapters | None,
) -> TargetRunner:
    """The target's passes over a pool of their own, by CUDA graphs where the device has them."""
    pool = target.new_pool(plan.num_blocks, config.block_size)
    states = target.new_states(NUM_SIDES * config.max_batch)
    graphs = None
    if config.compile == "auto" and pins(target.device) and states is None:
        graphs = PassGraphs(
            target,
            pool,
            max_batch=config.max_batch,
            max_blocks=max_blocks,
            capturer=CudaCapturer(target.device),
            per_row=1 + most_drafted(proposer, config),
            taps=proposer.taps,
            has_trees=proposer.tree is not None,
        )
    return TargetRunner(target, pool, graphs, states, adapters)


def most_drafted(proposer: Proposer, config: EngineConfig) -> int:
    """Most drafted tokens of a row of a round, unless a request asks for more."""
    if proposer.drafter is None:
        return 0
    return config.k if proposer.tree is None else proposer.tree.nodes


def check_recorded_taps(drafter: ServingDrafter | None, config: EngineConfig) -> None:
    if config.record_taps > 0 and (drafter is None or not drafter.taps):
        family = "no drafter" if drafter is None else f"a {drafter.family} drafter"
        raise UserError(
            f"record_taps is {config.record_taps} with {family}, which reads no states of the "
            "target; leave it out"
        )


def warn_of_positions(drafter: ServingDrafter | None, max_length: int) -> None:
    positions = draft_positions(drafter)
    if positions is not None and positions < max_length:
        log.warning(
            "the draft has %d positions and requests up to %d tokens: beyond its positions they go "
            "on without a draft",
            positions,
            max_length,
        )


def control_of(config: EngineConfig) -> Control:
    if not config.adaptive:
        return Control()
    tree = configured_tree(config)
    return AutoControl(min(3, config.k)) if tree is None else TreeControl(tree.depth)


def prefix_cache(
    target: Target, drafter: ServingDrafter | None, blocks: BlockManager, plan: BlockPlan
) -> PrefixCache:
    if drafter is None:
        return PrefixCache(blocks, root=target.revision)
    # A drafter that cannot hold the newest position before the next token is decided keeps values
    # there that depend on that token.
    far = 1 << 20
    ahead = max(0, far + 1 - drafter.cached_after(far, 0, 0))
    most = most_tapped(target, drafter, plan, blocks.block_size)
    return PrefixCache(
        blocks, root=target.revision, ahead=ahead, needs_taps=bool(drafter.taps), max_tapped=most
    )
