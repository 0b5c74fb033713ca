"""The pools of target and draft share one allowance of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.drafters.checkpoint import save
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import buffer_bytes
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.serve.cache import memory
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.requests.route import CANARY
from draftsmith.train.check.memory import ServedMemory, check_serving


def test_both_pools_fit_what_is_allowed(target: Target) -> None:
    head = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    config = EngineConfig(memory_gib=2**20 / memory.GIB, max_batch=64, compile="off")
    sizes = {}
    for drafter in (None, head):
        engine = build_engine(target, drafter, config)
        own = engine.proposer.pool
        used = engine.runner.pool.num_bytes + (0 if own is None else own.num_bytes)
        assert 0.9 * 2**20 < used <= 2**20
        sizes[drafter] = engine.scheduler.blocks.num_blocks
    assert sizes[head] < sizes[None]


def test_what_a_draft_keeps_from_its_first_round_on_is_counted(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the pools are sized, when its forward is captured."""
    head = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    config = EngineConfig(memory_gib=2**20 / memory.GIB, max_batch=64)
    plain = memory.plan_blocks(target, head, config)
    kept: list[int] = []
    monkeypatch.setattr(Eagle3, "capture_forward", lambda self: kept.append(10 * plain.block_bytes))
    monkeypatch.setattr(Eagle3, "buffer_bytes", property(lambda self: sum(kept)))
    for drafter in (head, TextFirst(head, Suffix())):
        kept.clear()
        engine = build_engine(target, drafter, config)
        assert engine.scheduler.blocks.num_blocks == plain.num_blocks - 10


def test_plan_and_doctor_count_what_a_draft_keeps(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    plain = ServedMemory.of(target, head)
    monkeypatch.setattr(Eagle3, "buffer_bytes", 3 * memory.GIB)
    for draft in (head, TextFirst(head, Suffix())):
        assert buffer_bytes(draft) == 3 * memory.GIB
    served = ServedMemory.of(target, head)
    assert served == plain._replace(buffers=3 * memory.GIB) and plain.buffers == 0
    assert served.whole(2, 10) - plain.whole(2, 10) == 3 * memory.GIB
    assert plain.whole(2, 10) - plain.weights == int(20 * plain.per_token)
    assert "buffers of the draft 3 GiB" in check_serving(target, head, 2).what


def test_further_drafts_take_no_buffers_of_their_own(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    save(head, tmp_path / "further", target)
    asked: list[tuple[object, object]] = []
    monkeypatch.setattr(Eagle3, "share_buffers", lambda *pair: asked.append(pair))
    engine = build_engine(target, head, EngineConfig(num_blocks=40))
    engine.drafts.prepare(str(tmp_path / "further"), "2", CANARY)
    engine.drafts.apply_swaps()
    assert asked == [(engine.drafts.served[CANARY].drafter, head)]


def test_a_gpu_gives_a_share_of_what_it_has_free(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    assert memory.allowed_bytes(torch.device("cuda", 0)) == 800
    assert memory.allowed_bytes(torch.device("cpu")) == 2 * memory.GIB


def test_taps_of_a_full_batch_take_what_the_cached_ones_may(target: Target) -> None:
    head = Eagle3.create(Eagle3Options(), target, seed=1).eval()
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


def test_the_pool_that_serves_is_the_targets_last(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks of a sharded target read and write the pool that was made last."""
    made: list[PagedPool] = []
    new_pool = target.new_pool

    def noted(num_blocks: int, block_size: int) -> PagedPool:
        made.append(new_pool(num_blocks, block_size))
        return made[-1]

    monkeypatch.setattr(target, "new_pool", noted)
    head = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    for num_blocks in (None, 40):
        engine = build_engine(target, head, EngineConfig(num_blocks=num_blocks, compile="off"))
        assert made[-1] is engine.runner.pool
