"""Passes of the target over stored answers."""

from hypothesis import given
from hypothesis import strategies as st

from draftsmith.distill.generate.steps import PASS_TOKENS, passes

LENGTHS = st.lists(st.integers(1, 2 * PASS_TOKENS), max_size=60)


@given(LENGTHS, st.integers(1, 64))
def test_every_text_is_read_once_and_padded_passes_are_bounded(
    lengths: list[int], most: int
) -> None:
    found = list(passes(lengths, most))
    assert sorted(row for rows in found for row in rows) == list(range(len(lengths)))
    for rows in found:
        longest = max(lengths[row] for row in rows)
        assert len(rows) == 1 or (len(rows) <= most and len(rows) * longest <= PASS_TOKENS)
