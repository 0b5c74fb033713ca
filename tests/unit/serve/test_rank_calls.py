"""What rank 0 tells the ranks that share its target: numbers of a fixed layout, one message a
pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.sharded import FRAME, Channel
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.attention.pool import TreeLayout
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.parallel import LeadingTarget
from draftsmith.serve.rank_calls import (
    Call,
    MoveCall,
    NewGraphs,
    NewPool,
    Pass,
    Prepare,
    StopRanks,
    WholePass,
    call_of,
    numbers_of,
)
from draftsmith.serve.sampling.params import SamplingParams

CPU = torch.device("cpu")


def some(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**40), 2**40, shape)


def passed(*, tree: bool, taps: tuple[int, ...], width: int = 5) -> Pass:
    layout = TreeLayout(some(7), some(7), some(7)) if tree else None
    return Pass(some(1, 7), some(1, 7), some(3, width), some(3), layout, some(4), taps)


CALLS = [
    NewPool(123, 16),
    NewGraphs(8, 65, 5, True, (0, 3, -1)),
    Prepare(9, 40),
    passed(tree=False, taps=()),
    passed(tree=True, taps=(0, 3, -1)),
    passed(tree=True, taps=())._replace(by_graph=True),
    MoveCall(some(6), some(6)),
    MoveCall(some(0), some(0)),
    WholePass(some(3, 5), some(3, 5), (0, 3)),
    WholePass(some(3, 5), None, ()),
    StopRanks(),
]


def assert_equal(found: object, given: object) -> None:
    assert type(found) is type(given)
    if isinstance(given, torch.Tensor):
        assert torch.equal(found, given)
    elif isinstance(given, tuple) and type(given) is not tuple:
        for one, other in zip(found, given, strict=True):
            assert_equal(one, other)
    else:
        assert found == given


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_call_arrives_as_it_was_sent(call: Call):
    numbers = numbers_of(call)
    assert numbers.dtype == torch.int64 and numbers.device == CPU
    assert_equal(call_of(numbers, CPU), call)


class Wire(Channel):
    """Broadcasts of one process, which it then receives itself."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.receiving = False

    def _broadcast(self, values: torch.Tensor) -> None:
        if self.receiving:
            values.copy_(self.sent.pop(0))
        else:
            self.sent.append(values.clone())


@pytest.mark.parametrize("count", [1, FRAME - 1, FRAME, FRAME + 1, 3 * FRAME])
def test_a_message_has_one_part_and_a_long_one_two(count: int):
    wire, numbers = Wire(), some(count)
    wire.send_numbers(numbers)
    assert len(wire.sent) == (1 if count <= FRAME else 2)
    wire.receiving = True
    assert torch.equal(wire.receive_numbers(), numbers)
    assert not wire.sent


def test_one_message_a_pass_and_none_for_drafts(tiny_target: Callable[..., str]):
    """Rank 0 drafts alone: no draft step asks the others for an embedding."""
    folder = tiny_target("llama")
    wire = Wire()
    target = LeadingTarget.load(folder, dtype="float32").lead(wire)
    drafter = FAMILIES["eagle3"].create(Eagle3Options(), target, seed=0).to(torch.float32)
    wire.sent.clear()  # a new draft is fitted to states of the target
    engine = build_engine(target, drafter, EngineConfig(compile="off", k=4, max_length=96))
    assert {type(call_of(frame[1 : 1 + frame[0]], CPU)) for frame in wire.sent} == {NewPool}
    wire.sent.clear()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    (answer,) = engine.generate([[5, 6, 7]], params)
    assert engine.stats.num_draft_tokens > 10
    assert len(wire.sent) == engine.stats.num_rounds
    assert {type(call_of(frame[1 : 1 + frame[0]], CPU)) for frame in wire.sent} == {Pass}
    plain = Target.load(folder, dtype="float32")
    assert [answer.tokens] == plain.answer([[5, 6, 7]], max_new_tokens=24, ignore_eos=True)
