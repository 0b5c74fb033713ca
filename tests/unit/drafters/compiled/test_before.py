"""The part of a forward before its kernels: the graph's values, rotations made once a position."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node

from draftsmith.drafters.compiled.one_call import PositionTables, deciding, part_of

RATES, ROWS = torch.tensor([1.0, 0.5]), torch.arange(12.0).view(6, 2)


class Made:
    """A graph of (ids, positions, context, table, rates): angles, rows of the table, their sum and
    angles that depend on all positions."""

    def __init__(self) -> None:
        self.asked: list[torch.Tensor] = []
        self.graph = graph = Graph()
        names = ("ids", "positions", "context", "table", "rates")
        self.ids, self.positions, _, table, rates = (graph.placeholder(name) for name in names)
        for node in (self.ids, self.positions):
            node.meta["val"] = torch.zeros(1, 3, dtype=torch.int64)
        self.constants = [table, rates]
        self.turned = graph.call_function(self.angles, (self.positions, rates))
        self.rows = graph.call_function(torch.embedding, (table, self.ids))
        self.mixed = graph.call_function(torch.add, (self.rows, self.turned))
        self.shifted = graph.call_function(torch.roll, (self.turned, 1, 1))
        graph.output((self.turned, self.rows, self.mixed, self.shifted))

    def angles(self, positions: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
        self.asked.append(positions)
        return positions[..., None] * rates

    def tables(self, *nodes: Node) -> PositionTables:
        return PositionTables(self.graph, nodes, self.positions, [ROWS, RATES])


def test_what_positions_alone_decide_is_found() -> None:
    made = Made()
    found = [deciding(node, made.constants) for node in (made.turned, made.rows, made.mixed)]
    assert found == [made.positions, None, None]


def test_a_position_is_worked_out_once() -> None:
    made = Made()
    tables = made.tables(made.turned)
    assert len(made.asked) == 1
    assert torch.equal(tables.tables[0], torch.arange(256.0)[:, None] * RATES)
    assert not tables.reach(255) and len(made.asked) == 1
    assert tables.reach(256) and len(tables.tables[0]) == 512
    assert tables.reach(5000) and tables.tables[0][5000].tolist() == [5000.0, 2500.0]
    assert not tables.reach(-1)


def test_tokens_that_depend_on_each_other_have_no_table() -> None:
    made = Made()
    assert made.tables(made.turned).by_token
    assert not made.tables(made.turned, made.shifted).by_token


@pytest.mark.parametrize("ids", [[3], [3, 4]])
def test_the_rest_is_the_graph_s(ids: list[int]) -> None:
    made = Made()
    positions = torch.arange(7, 7 + len(ids))[None]
    part = part_of(made.graph, [made.mixed, made.rows])
    mixed, rows = part(torch.tensor([ids]), positions, None, ROWS, RATES)
    assert torch.equal(rows, ROWS[ids][None])
    assert torch.equal(mixed, ROWS[ids] + positions[..., None] * RATES)
