from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.serve.cache.blocks import BlockManager


def check(manager: BlockManager, owners: list[list[int]]) -> None:
    held = [block for blocks in owners for block in blocks]
    assert NULL_BLOCK not in held
    assert all(0 < block < manager.num_blocks for block in held)
    for block in range(1, manager.num_blocks):
        assert manager.references(block) == held.count(block)
    assert manager.num_free + len(set(held)) == manager.num_usable


@example(2, 1, [("grow", 0, 1), ("share", 0, 0), ("release", 0, 0)])
@settings(max_examples=200, deadline=None)
@given(
    num_blocks=st.integers(2, 20),
    block_size=st.integers(1, 5),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["grow", "release", "share"]), st.integers(0, 3), st.integers(0, 30)
        ),
        max_size=40,
    ),
)
def test_every_block_is_free_or_counted_for_its_owners(
    num_blocks: int, block_size: int, actions: list[tuple[str, int, int]]
) -> None:
    manager = BlockManager(num_blocks, block_size)
    owners: list[list[int]] = [[] for _ in range(4)]
    for action, index, amount in actions:
        before = list(owners[index])
        if action == "grow":
            fits = manager.blocks_for(amount) - len(before) <= manager.num_free
            assert manager.grow(owners[index], amount) == fits
            assert owners[index][: len(before)] == before
            assert len(owners[index]) == (
                max(len(before), manager.blocks_for(amount)) if fits else len(before)
            )
        elif action == "release":
            manager.release(owners[index])
            assert owners[index] == []
        else:
            owners.append(manager.share(owners[index]))
        check(manager, owners)
