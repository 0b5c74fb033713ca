"""The pools of target and draft share one allowance of memory."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.target.target import Target
from draftsmith.serve.cache import memory
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine


def test_both_pools_fit_what_is_allowed(target: Target, head: Eagle3) -> None:
    config = EngineConfig(memory_gib=2**20 / memory.GIB, max_batch=64, compile="off")
    sizes = {}
    for drafter in (None, head):
        engine = build_engine(target, drafter, config)
        own = engine.proposer.pool
        used = engine.runner.pool.num_bytes + (0 if own is None else own.num_bytes)
        assert 0.9 * 2**20 < used <= 2**20
        sizes[drafter] = engine.scheduler.blocks.num_blocks
    assert sizes[head] < sizes[None]


def test_a_gpu_gives_a_share_of_what_it_has_free(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    assert memory.allowed_bytes(torch.device("cuda", 0)) == 800
    assert memory.allowed_bytes(torch.device("cpu")) == 2 * memory.GIB


def test_taps_of_a_full_batch_take_what_the_cached_ones_may(target: Target, head: Eagle3) -> None:
    tap_bytes = len(head.taps) * target.hidden_size * target.dtype.itemsize
    for gib, batch in ((0.01, 4), (0.01, 16), (2.0, 4)):
        config = EngineConfig(num_blocks=int(gib * 2**14), max_batch=batch, compile="off")
        plan = memory.plan_blocks(target, head, config)
        most = memory.most_kept(target, head, plan, config)
        pools = plan.num_blocks * memory.block_bytes(target, head, config.block_size)
        if memory.FEWEST_UNREAD < most < memory.MOST_UNREAD:
            assert 0.8 * pools < 8 * batch * most * tap_bytes <= pools
        else:
            assert most == (memory.MOST_UNREAD if gib > 1 else memory.FEWEST_UNREAD)
