"""Texts that several processes read for a learner: each by one of them, and as one process reads
them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.distill.config import DistillConfig
from draftsmith.distill.learn import processes
from draftsmith.distill.learn.processes import FirstProcess, TextsCall
from draftsmith.distill.learn.text_states import TextState, TextStates
from draftsmith.drafters.target.target import Target

TAPS = (0, 1)
CONFIG = DistillConfig(target="t", draft="d", buffer="b", versions="v")


@pytest.fixture
def texts() -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return [torch.randint(3, 288, (size,), generator=chance) for size in (5, 17, 9, 30, 9)]


class Wires:
    """A channel of three processes, of which `mine` is one, in threads of one."""

    def __init__(self, calls: list[queue.Queue], given: list[queue.Queue], mine: int):
        self.calls, self.given, self.mine = calls, given, mine

    def send(self, call: Any) -> None:
        for one in self.calls[1:]:
            one.put(call)

    def receive(self, device: torch.device) -> Any:
        return self.calls[self.mine].get(timeout=60)

    def give(self, value: torch.Tensor) -> None:
        self.given[self.mine].put(value)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        value = self.given[source].get(timeout=60)
        assert value.shape == shape and value.dtype == dtype
        return value


@pytest.fixture
def read(target: Target, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`read(texts, taps)` -> states by three processes, and the numbers of the texts' tokens that
    each of them read."""
    place = threading.local()
    place.rank = 0
    passes: list[list[int]] = [[], [], []]
    # The threads share a target, whose passes take note of layers one at a time.
    read_one, alone = processes.read_one, threading.Lock()

    def counted(target: Target, ids: torch.Tensor, taps: tuple[int, ...]) -> TextState:
        passes[place.rank].append(len(ids))
        with alone:
            return read_one(target, ids, taps)

    monkeypatch.setattr(processes, "read_one", counted)
    monkeypatch.setattr(processes, "open_target", lambda config, folder: target)
    monkeypatch.setattr(processes, "leave_signals_to_the_leader", lambda: None)
    monkeypatch.setattr(processes.dist, "get_rank", lambda: place.rank)
    monkeypatch.setattr(processes.dist, "get_world_size", lambda: 3)
    calls, given = ([queue.Queue() for _ in range(3)] for _ in range(2))

    def follow(rank: int, config: DistillConfig) -> None:
        place.rank = rank
        processes.follow(config, Wires(calls, given, rank))  # type: ignore[arg-type]

    def start(texts: list[torch.Tensor], config: DistillConfig = CONFIG) -> Any:
        threads = [threading.Thread(target=follow, args=(rank, config)) for rank in (1, 2)]
        for one in threads:
            one.start()
        first = FirstProcess(Wires(calls, given, 0))  # type: ignore[arg-type]
        _, read = first.open(config, "folder")
        assert read is not None
        found = read(texts, TAPS)
        first.stop()
        for one in threads:
            one.join(60)
            assert not one.is_alive()
        return found, passes

    return start


def test_each_text_is_read_once_and_in_its_place(
    target: Target, read: Callable[..., Any], texts: list[torch.Tensor]
) -> None:
    found, passes = read(texts)
    assert passes == [[30, 9], [17, 5], [9]]
    for ids, state in zip(texts, found, strict=True):
        (expected,) = TextStates(target, 1 << 30)._read([ids], TAPS)
        assert torch.equal(state.hidden, expected.hidden)
        assert torch.equal(state.taps, expected.taps)


def test_no_text_and_fewer_texts_than_processes(
    read: Callable[..., Any], texts: list[torch.Tensor]
) -> None:
    assert read([]) == ([], [[], [], []])
    found, passes = read(texts[:1])
    assert len(found) == 1 and passes == [[5], [], []]


def test_processes_that_share_a_copy_make_equally_many_passes(
    read: Callable[..., Any], texts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "load_config", lambda folder, trust_remote_code: None)
    config = DistillConfig(target="t", draft="d", buffer="b", versions="v", target_shares=3)
    found, passes = read(texts[:4], config)
    assert passes == [[30, 5], [17, 1], [9, 1]] and len(found) == 4


def test_texts_keep_their_ends() -> None:
    call = TextsCall(torch.tensor([[4, 5, 6], [7, 0, 0], [8, 9, 0]]), torch.tensor([3, 1, 2]), ())
    assert [ids.tolist() for ids in call.of(0, 2)] == [[4, 5, 6], [8, 9]]
    assert [ids.tolist() for ids in call.of(1, 2)] == [[7]]
