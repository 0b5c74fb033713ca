from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.constants import MAX_NODES
from draftsmith.kernels.verify.verdict import DraftTree, ancestors, depths, paths
from tests.draft_trees import ancestor_bits, slot_prefixes


def rows(*values: list[int]) -> torch.Tensor:
    return torch.tensor(values)


def test_a_node_that_hangs_nowhere_has_itself_alone() -> None:
    tree = DraftTree(
        rows([5, 6, 7, 8], [1, 2, 99, 99]),
        rows([-1, 0, -2, 1], [-1, -1, 99, -99]),
        torch.tensor([4, 2]),
    )
    assert depths(tree).tolist() == [[0, 1, -1, 2], [0, 0, -1, -1]]
    assert ancestors(tree).tolist() == [[0b11, 0b111, 0b1000, 0b10111], [0b11, 0b101, 8, 16]]
    none = -1
    assert paths(tree).tolist() == [
        [
            [none] * 4,
            [5, none, none, none],
            [5, 6, none, none],
            [none, none, 7, none],
            [5, 6, none, 8],
        ],
        [
            [none] * 4,
            [1, none, none, none],
            [none, 2, none, none],
            [none, none, 99, none],
            [none, none, none, 99],
        ],
    ]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, MAX_NODES).flatmap(
        lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n)))
    )
)
def test_depths_and_bits_follow_the_parents(parents: tuple[int, ...]) -> None:
    tree = DraftTree(
        torch.zeros(1, len(parents), dtype=torch.int64),
        rows(list(parents)),
        torch.tensor([len(parents)]),
    )
    deep: list[int] = []
    bits: list[int] = []
    for node, parent in enumerate(parents):
        deep.append(0 if parent < 0 else deep[parent] + 1)
        bits.append((1 if parent < 0 else bits[parent]) | 1 << node + 1)
    assert depths(tree).tolist() == [deep] and ancestor_bits(tree).tolist() == [bits]
    assert ancestors(tree).tolist() == [bits]
    assert [len(prefix) for prefix in slot_prefixes(tree)[0]] == [0, *(depth + 1 for depth in deep)]
