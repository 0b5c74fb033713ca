"""The part of a forward before its first kernel: embeddings, and what positions alone decide, which
is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

MOST_KEPT = 4096  # positions, of less than 2 KB each


class Before:
    """Values of the nodes `wanted` for a graph's inputs. Of a pass of one token those that one
    whole number decides, its position, are made once for each.

    Args:
        constants: the graph's last inputs. `forget` says that they have changed.
    """

    def __init__(self, graph: Graph, wanted: Sequence[Node], constants: Collection[Node]):
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        decided = {node: _deciding(node, constants) for node in wanted}
        # Input that decides most of the nodes; the others are made anew.
        found = [node for node in decided.values() if node is not None]
        number = max(found, key=found.count, default=None)
        self._number = None if number is None else inputs.index(number)
        kept = [node for node in wanted if number is not None and decided[node] is number]
        others = [node for node in wanted if node not in kept]
        self._all = _part(graph, wanted)
        self._of_number = _part(graph, kept)
        self._others = _part(graph, others, embedding=_embedding)
        self._order = [[*kept, *others].index(node) for node in wanted]
        self._kept: dict[int, tuple[torch.Tensor, ...]] = {}

    def forget(self) -> None:
        self._kept.clear()

    def __call__(
        self, inputs: Sequence[torch.Tensor], context: Any, constants: Sequence[Any]
    ) -> Sequence[torch.Tensor]:
        number = None if self._number is None else inputs[self._number]
        if number is None or number.numel() > 1 or number.dtype != torch.int64:
            return self._all(*inputs, context, *constants)
        key = number.item()
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            kept = self._kept[key] = self._of_number(*inputs, context, *constants)
        found = (*kept, *self._others(*inputs, context, *constants))
        return [found[index] for index in self._order]


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


def _deciding(node: Node, constants: Collection[Node]) -> Node | None:
    """The only input that the node depends on; None for several, and for a row of a table, of which
    there may be many large ones."""
    needed = _needed([node])
    if any(one.target is torch.embedding for one in needed):
        return None
    inputs = [one for one in needed if one.op == "placeholder" and one not in constants]
    return inputs[0] if len(inputs) == 1 else None


def _embedding(table: torch.Tensor, ids: torch.Tensor, *options: object) -> torch.Tensor:
    """As torch's; of one id the row where it lies, in a fraction of the time."""
    if ids.numel() > 1:
        return torch.embedding(table, ids, *options)
    return table[ids.item()].view(*ids.shape, -1)


def _part(
    graph: Graph, wanted: Sequence[Node], embedding: Callable[..., torch.Tensor] = torch.embedding
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The part of the graph that gives `wanted`, with the same inputs, and with `embedding` in
    torch's place."""
    needed = _needed(wanted)
    part = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
            if node.target is torch.embedding:
                copies[node].target = embedding
    part.output(tuple(copies[node] for node in wanted))
    return GraphModule({}, part).forward
