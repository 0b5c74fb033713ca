from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.interface import Proposal
from draftsmith.errors import UserError
from draftsmith.serve.audit.misreport import Misreport, slot_depths


def test_q_is_sharper_from_its_depth_on_and_drafts_stay() -> None:
    logits = torch.randn(2, 3, 5).log_softmax(-1)
    proposal = Proposal(
        tokens=torch.ones(2, 3, dtype=torch.int64), lengths=torch.tensor([3, 2]), logits=logits
    )
    wrong = Misreport.parse("2:3").apply(proposal, 5)
    assert wrong.logits is not None and torch.equal(wrong.tokens, proposal.tokens)
    assert torch.equal(wrong.logits[:, 0], logits[:, 0])
    assert torch.allclose(wrong.logits[:, 1:], 3 * logits[:, 1:])


def test_drafts_that_were_not_drawn_get_less_than_1() -> None:
    proposal = Proposal(tokens=torch.tensor([[4, 2]]), lengths=torch.tensor([2]), logits=None)
    wrong = Misreport(2, 4.0).apply(proposal, 5)
    assert wrong.logits is not None
    probs = wrong.logits.softmax(-1)
    assert probs[0, 0].tolist() == [0, 0, 0, 0, 1]
    assert probs[0, 1, 2] == pytest.approx(0.25) and probs[0, 1, 0] == pytest.approx(0.75 / 4)


def test_of_a_tree_the_children_below_its_depth_are_wrong() -> None:
    """Root with nodes 0 and 1; node 2 below node 0."""
    parents = torch.tensor([[-1, -1, 0]])
    assert slot_depths(parents).tolist() == [[0, 1, 1, 2]]
    logits = torch.randn(2, 5).log_softmax(-1)
    q_rows = torch.tensor([[0, 1, -1, -1]])
    tokens, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([3])
    proposal = Proposal(
        tokens=tokens, lengths=lengths, logits=logits, parents=parents, q_rows=q_rows
    )
    wrong = Misreport(2, 3.0).apply(proposal, 5)
    assert wrong.logits is not None
    assert torch.equal(wrong.logits[0], logits[0]) and torch.allclose(
        wrong.logits[1], 3 * logits[1]
    )
    undrawn = Proposal(tokens=tokens, lengths=lengths, logits=None, parents=parents)
    assert Misreport(1, 3.0).apply(undrawn, 5) is undrawn, "verification reads no q of such a tree"


@pytest.mark.parametrize("text", ["2", "0:3", "2:0", "a:b", "2:inf", ""])
def test_what_is_no_misreport_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="DEPTH:FACTOR"):
        Misreport.parse(text)
