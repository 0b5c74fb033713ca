"""The part of a forward before its kernels: the graph's values, rotations made once a position."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from draftsmith.drafters.compiled import before
from draftsmith.drafters.compiled.before import Before


@pytest.fixture
def made(monkeypatch) -> tuple[Before, list[torch.Tensor]]:
    """Of (ids, positions, context, table, rates): rows of the table, and angles; the arguments of
    every angle that was made."""
    asked: list[torch.Tensor] = []

    def angles(positions: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
        asked.append(positions)
        return positions[..., None] * rates

    graph = Graph()
    ids, positions, _, table, rates = (
        graph.placeholder(name) for name in ("ids", "positions", "context", "table", "rates")
    )
    rows = graph.call_function(torch.embedding, (table, ids))
    turned = graph.call_function(angles, (positions, rates))
    mixed = graph.call_function(torch.add, (rows, turned))
    graph.output((turned, rows, mixed))
    return Before(graph, [turned, rows, mixed], [table, rates]), asked


def call(found: Before, ids: list[int], positions: list[int]) -> list[list]:
    table = torch.arange(12.0).view(6, 2)
    rates = torch.tensor([1.0, 0.5])
    values = found([torch.tensor([ids]), torch.tensor([positions])], None, [table, rates])
    return [value.tolist() for value in values]


def test_a_position_is_worked_out_once_and_ids_every_time(made) -> None:
    found, asked = made
    first = call(found, [3], [7])
    assert first == [[[[7.0, 3.5]]], [[[6.0, 7.0]]], [[[13.0, 10.5]]]]
    again = call(found, [5], [7])
    assert again == [[[[7.0, 3.5]]], [[[10.0, 11.0]]], [[[17.0, 14.5]]]]
    assert call(found, [3], [8])[0] == [[[8.0, 4.0]]]
    # `mixed` depends on the id too, so that its own angles are made again.
    alone = [one for one in asked if one.item() == 7]
    assert len(alone) == 3


def test_several_tokens_are_not_kept(made) -> None:
    found, _ = made
    assert call(found, [3, 4], [7, 8])[0] == [[[7.0, 3.5], [8.0, 4.0]]]
    assert not found._kept


def test_what_is_kept_is_bounded_and_forgotten_with_the_weights(made, monkeypatch) -> None:
    found, _ = made
    monkeypatch.setattr(before, "MOST_KEPT", 4)
    for position in range(11):
        assert call(found, [1], [position])[0] == [[[position, position / 2]]]
        assert len(found._kept) <= 4
    found.forget()
    assert not found._kept
