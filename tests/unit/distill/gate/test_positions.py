"""States of a draft at the positions that it drafted."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from draftsmith.distill.buffer.traffic import stitch
from draftsmith.distill.gate.logged import DraftedPositions, LoggedPosition, Position, positions_of
from draftsmith.drafters.interface import UnrollBatch, UnrolledStep
from draftsmith.record import Distributions
from tests.round_records import round_record

ROWS, LENGTH, WIDTH, VOCAB = 2, 9, 4, 6


class Heads:
    """A head of its own for each depth, as Medusa's, and other offsets."""

    taps: tuple[int, ...] = ()
    vocab_map = None

    def __init__(self, own_heads: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(2, ROWS, LENGTH, WIDTH, generator=generator)
        heads = torch.randn(2, VOCAB, WIDTH, generator=generator)
        self.heads = heads if own_heads else heads[:1].expand(2, -1, -1)
        self.own_heads = own_heads

    def head_weight(self) -> torch.Tensor:
        return self.heads[0]

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        valid = torch.arange(LENGTH).expand(ROWS, -1) < LENGTH - 2
        for depth in range(2):
            head = self.heads[depth] if self.own_heads else None
            yield UnrolledStep(hidden=self.hidden[depth], valid=valid, offset=1 + depth, head=head)


def position(row: int, begin: int, depth: int) -> Position:
    record = round_record(
        position=begin, drafted=[1, 1], accepted=2, committed=[1, 1],
        p=Distributions.unlogged(2),
    )  # fmt: skip
    return Position(row, LoggedPosition(record, depth))


def test_each_position_is_read_at_its_depth() -> None:
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    batch = UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=None, num_steps=2)
    positions = [position(row, begin, depth) for row, begin, depth in [(0, 2, 0), (0, 2, 1), (1, 5, 0), (1, 5, 1), (1, 9, 0), (1, 9, 1)]]  # fmt: skip
    for own_heads in (False, True):
        draft = Heads(own_heads)
        drafted = DraftedPositions.of(draft, batch, positions)
        # A stop string cut the text: what was drafted behind it is not there.
        assert drafted.is_drafted.tolist() == [True, True, True, True, False, False]
        wanted = torch.stack(
            [
                draft.heads[one.logged.depth]
                @ draft.hidden[one.logged.depth, one.row, one.absolute - 1 - one.logged.depth]
                for one in positions[:4]
            ]
        )
        torch.testing.assert_close(drafted.logits(slice(0, 4)), wanted)
        torch.testing.assert_close(drafted.logits(slice(1, 3)), wanted[1:3])


def test_accepted_tokens_that_the_end_of_an_answer_trims_off_are_no_positions() -> None:
    """A request for one token more, whose three drafts were accepted: the text holds no context of
    the second and third."""
    record = round_record(
        position=3, context=[1, 1, 1], drafted=[1, 1, 1], accepted=3, committed=[1],
        p=Distributions.unlogged(3),
    )  # fmt: skip
    text = stitch([record])
    assert text is not None and len(text.tokens) == 4
    found = positions_of(text, 0, max_depth=3, max_length=100)
    assert [one.absolute for one in found] == [3, 4]
