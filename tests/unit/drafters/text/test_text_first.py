"""Suffix decoding beside a model: who drafts which row, and that the distributions are those of who
drafted."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, Remembering
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from tests.first_rounds import text_round

VOCAB = 20


class Model:
    """Drafts token 9 for as long as it may, by a distribution of two tokens."""

    family, taps = "made-up", (3,)

    def __init__(self, *, greedy: bool = False):
        self.greedy, self.asked = greedy, []

    def new_pool(self, num_blocks, block_size, device, dtype):
        return None

    def propose(self, inputs: DraftInputs) -> Proposal:
        self.asked.append(inputs.num_draft.tolist())
        width = int(inputs.num_draft.max())
        used = torch.arange(width)[None] < inputs.num_draft[:, None]
        logits = torch.full((len(inputs.num_draft), width, VOCAB), -torch.inf)
        logits[..., 9], logits[..., 8] = 0.0, -1.0
        tokens = torch.where(used, 9, -1)
        return Proposal(
            tokens=tokens, lengths=inputs.num_draft, logits=None if self.greedy else logits
        )

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        return last + 1 + accepted


def propose(drafter: TextFirst, histories: list[list[int]], num_draft: list[int]) -> Proposal:
    names = [str(row) for row in range(len(histories))]
    return drafter.propose(text_round(histories, num_draft, request_ids=names))


REPEATED, NEW = [1, 2, 3, 4, 5] * 6 + [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]


def test_text_drafts_where_it_is_sure_and_the_model_elsewhere():
    model = Model()
    proposal = propose(TextFirst(model, Suffix()), [REPEATED, NEW, REPEATED], [3, 2, 0])
    assert model.asked == [[0, 2, 0]], (
        "every row is read by the model; it drafts those that text does not"
    )
    assert proposal.tokens.tolist() == [[5, 1, 2], [9, 9, -1], [-1, -1, -1]]
    assert proposal.lengths.tolist() == [3, 2, 0] and proposal.copied == {0}
    one_hot = torch.full((3, VOCAB), -torch.inf)
    one_hot[torch.arange(3), torch.tensor([5, 1, 2])] = 0.0
    assert torch.equal(proposal.logits[0], one_hot)
    assert proposal.logits[1, 0, 8] == -1.0 and proposal.logits[1, 0, 9] == 0.0


def test_text_alone_leaves_nothing_to_the_model():
    proposal = propose(TextFirst(Model(), Suffix()), [REPEATED], [2])
    assert proposal.tokens.tolist() == [[5, 1]] and proposal.logits.shape == (1, 2, VOCAB)


def test_greedy_models_need_no_distributions():
    proposal = propose(TextFirst(Model(greedy=True), Suffix()), [REPEATED, NEW], [3, 3])
    assert proposal.tokens.tolist() == [[5, 1, 2], [9, 9, 9]] and proposal.logits is None


def rounds_of(
    drafter: TextFirst, count: int, committed: list[int], *, shared: bool = True
) -> list[bool]:
    """True for each request whose first round text drafted, which `committed` then follows."""
    copied = []
    for number in range(count):
        # Behind the last token comes 2 alone: text expects one token of k = 3.
        for text in ([1, 2, 7, 1], [1, 2, 7, 1, *committed]):
            asked = {"request_ids": [str(number)], "shares": [shared]}
            proposal = drafter.propose(text_round([text], [3], **asked))
            copied.append(proposal.copied == {0})
    return copied[::2]


def test_who_kept_more_lately_drafts():
    """Text takes over where nothing of the model's drafts is kept, and gives way where nothing of
    its own is either; it never comes in where the model's are kept."""
    drafter = TextFirst(Model(), Suffix())
    copied = rounds_of(drafter, 60, [8])
    assert not copied[0] and any(copied) and drafter.text_share < 0.9 > 2 * drafter.model_share
    assert any(copied[30:]) and not all(copied[30:])
    drafter = TextFirst(Model(), Suffix())
    assert not any(rounds_of(drafter, 60, [9, 9, 9, 8])) and drafter.model_share > 0.95


@pytest.mark.parametrize(
    ("committed", "shared"), [([], True), ([9, 9, 9, 8, 8], True), ([8], False)]
)
def test_rounds_that_may_say_nothing_of_a_draft_teach_nothing(committed, shared):
    """One that was given up, several before the next draft, and those of a request with a seed."""
    drafter = TextFirst(Model(), Suffix())
    rounds_of(drafter, 20, committed, shared=shared)
    assert (drafter.model_share, drafter.text_share) == (0.8, 1.0)


def test_it_stands_in_for_its_model():
    drafter = TextFirst(Model(), Suffix())
    assert drafter.family == "made-up" and drafter.taps == (3,) and isinstance(drafter, Remembering)
    # Positions of copied tokens were never written by the model.
    assert drafter.cached_after(10, 4, 3) == 11
    drafter.finished("a", [1, 2, 3])
    assert drafter.text.shared.num_texts == 1
