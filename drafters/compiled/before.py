"""The part of a forward before its first kernel: what positions alone decide is kept in tables, the
rest is torch's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_FIRST_ROWS = 256  # of a table of positions
_TOLERANCE = 1e-2  # of a cosine; a forward that mixes positions is further off


class PositionTables:
    """Values that one input of a graph, whole numbers, decides token by token: a row of each for
    every number from 0 on.

    Args:
        nodes: those that depend on no other input; see `deciding`.
        constants: values of the graph's last inputs.
    """

    def __init__(self, graph: Graph, nodes: Sequence[Node], number: Node, constants: Sequence[Any]):
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._part, self._constants = part_of(graph, nodes), constants
        self.input = inputs.index(number)  # of the graph, by its number
        self._after = len(inputs) - self.input - 1 - len(constants)
        self._dims = number.meta["val"].ndim
        self.tables: list[torch.Tensor] = []
        self.make(_FIRST_ROWS)

    @property
    def by_token(self) -> bool:
        """True where a token's rows do not depend on the other tokens."""
        chosen = torch.tensor([3, 1, 4])
        pairs = zip(self._values(chosen), self.tables)
        return all(torch.allclose(one, rows[chosen], atol=_TOLERANCE) for one, rows in pairs)

    def make(self, num_rows: int) -> None:
        self.tables = self._values(torch.arange(num_rows))

    def reach(self, number: int) -> bool:
        """Make the tables longer where they have no row `number`; False where there is nothing to
        be made."""
        num_rows = len(self.tables[0]) if self.tables else number + 1
        if not 0 <= num_rows <= number:
            return False
        self.make(max(2 * num_rows, number + 1))
        return True

    @torch.no_grad()
    def _values(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        given = numbers.view(*[1] * (self._dims - 1), -1)
        nothing = (None,) * self.input, (None,) * self._after
        found = self._part(*nothing[0], given, *nothing[1], *self._constants)
        return [value.reshape(len(numbers), -1).contiguous() for value in found]


def _needed(wanted: Sequence[Node]) -> set[Node]:
    """The nodes and all that they are made of."""
    needed: set[Node] = set()
    open_nodes = list(wanted)
    while open_nodes:
        node = open_nodes.pop()
        if node not in needed:
            needed.add(node)
            open_nodes += node.all_input_nodes
    return needed


def deciding(node: Node, constants: Collection[Node]) -> Node | None:
    """The only input that the node depends on, whole numbers; None for several, and for a row of a
    table, of which there is one already."""
    needed = _needed([node])
    if any(one.target is torch.embedding for one in needed):
        return None
    inputs = [one for one in needed if one.op == "placeholder" and one not in constants]
    if len(inputs) != 1 or inputs[0] is node or inputs[0].meta["val"].dtype != torch.int64:
        return None
    return inputs[0]


def part_of(graph: Graph, wanted: Sequence[Node]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The part of the graph that gives `wanted`, with the same inputs."""
    needed = _needed(wanted)
    part = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in wanted))
    return GraphModule({}, part).forward
