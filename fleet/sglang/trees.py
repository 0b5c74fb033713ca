"""Kept path of a verified tree, with the first draft that was rejected.

Legend: b requests of a batch, N nodes of a tree, its root among them, which is the last token
before the round.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Tree(NamedTuple):
    """Tree of one request, as SGLang has it: children and siblings by node, -1 for none."""

    tokens: np.ndarray  # [N]
    places: np.ndarray  # [N] row of each node among those of the batch (`retrieve_index`)
    first_child: np.ndarray  # [N] `retrieve_next_token`
    sibling: np.ndarray  # [N] `retrieve_next_sibling`

    def children(self, node: int) -> list[int]:
        found: list[int] = []
        child = int(self.first_child[node])
        while child >= 0 and len(found) < len(self.tokens):
            found.append(child)
            child = int(self.sibling[child])
        return found

    @property
    def is_chain(self) -> bool:
        return bool((self.sibling < 0).all())


class Path(NamedTuple):
    """Drafted positions of a round that a record holds: of a chain all, of a tree those of the kept
    path and the first rejected one."""

    parents: list[int]  # node whose distribution is that of each position
    nodes: list[int]  # node drafted there
    siblings: list[list[int]]  # tokens drafted there
    drafted: list[int]
    committed: list[int]  # accepted tokens and the one behind them


def path_of(tree: Tree, predict: np.ndarray, accepted_at: np.ndarray) -> Path:
    """`predict` [b * N] holds the token behind every accepted node, `accepted_at` the rows of these
    nodes, the root's first. Raises `ValueError` where they are not of this tree."""
    by_place = {int(place): node for node, place in enumerate(tree.places)}
    try:
        kept = [by_place[int(place)] for place in accepted_at]
    except KeyError as error:
        raise ValueError(f"row {error} is no node of the tree") from error
    parents, nodes = kept[:-1], kept[1:]
    at = kept[-1]
    while children := tree.children(at):
        parents, nodes = [*parents, at], [*nodes, children[0]]
        if not tree.is_chain:
            break
        at = children[0]
    return Path(
        parents=parents,
        nodes=nodes,
        siblings=[[int(tree.tokens[one]) for one in tree.children(node)] for node in parents],
        drafted=[int(tree.tokens[node]) for node in nodes],
        committed=[int(predict[place]) for place in accepted_at],
    )
