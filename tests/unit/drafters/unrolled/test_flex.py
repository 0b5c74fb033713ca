"""Where `flex_attention` may run: not with heads too narrow to be compiled for, and not uncompiled
where that would keep all scores."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from draftsmith.drafters.blocks import block_unroll
from draftsmith.drafters.unrolled import flex, unroll
from tests.unit.drafters.blocks import test_block_attention as of_blocks
from tests.unit.drafters.unrolled import test_fused_unroll as of_unroll


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    flex._limit_reached.clear()


def test_one_variant_too_many_ends_it_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flex, "RECOMPILES", 2)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    def named(states: torch.Tensor, name: str) -> torch.Tensor:
        return states + len(name)

    compiled = flex._compiled(named)
    for name in ("a", "bc"):
        assert compiled(torch.zeros(()), name) == len(name)
    assert not flex._limit_reached.is_set()
    for name in ("def", "ghij"):
        with pytest.raises(flex.LimitReached):
            compiled(torch.zeros(()), name)
    with FakeTensorMode():
        states = torch.empty(1, 2, 4, 64, device="cuda")
    assert not flex.can_flex(states, states)
    assert [one.levelname for one in caplog.records if one.name == flex.log.name] == ["WARNING"]


def reached(*given: Any) -> torch.Tensor:
    raise flex.LimitReached


@pytest.mark.parametrize("part", ["flex", "block_mask"])
def test_attention_goes_on_in_chunks(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (unroll, block_unroll):
        monkeypatch.setattr(module, "LONG", 0)
        monkeypatch.setattr(module, "can_flex", lambda query, value: True)
        monkeypatch.setattr(module, "can_fuse", lambda query, value: False)
        monkeypatch.setattr(module, part, reached)
    of_unroll.check(None, 0, None, length=80)
    made = of_blocks.states(80, 0, own_context=False)
    of_blocks.check(made, None, 0, None, causal=True)
