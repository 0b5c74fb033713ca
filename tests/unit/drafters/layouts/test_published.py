"""Every published layout: read as it is published, drafting what the published formulas draft in
plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import Proposal, TrainedDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from tests.draft_variants import EAGLE3, VARIANTS, eagle3
from tests.first_rounds import first_round
from tests.published_drafts import LAYOUTS, PAGE, Layout, eagle3_reference, page, snowflake
from tests.unrolled import unrolled_logits

TARGET_DTYPE = torch.float64
K = 3
TEXT = torch.randint(3, 288, (13,), generator=torch.Generator().manual_seed(1)).tolist()


def propose(drafter: TrainedDrafter, target: Target) -> Proposal:
    return drafter.propose(first_round(drafter, target, [TEXT], [K]))


@torch.no_grad()
@pytest.mark.parametrize("layout", [*LAYOUTS, *VARIANTS], ids=lambda layout: layout.name)
def test_a_published_draft_follows_its_formula(
    layout: Layout, target: Target, tmp_path: Path
) -> None:
    """Unrolled for training too, and saved as it was read."""
    made = layout.make(target)
    made.write(tmp_path / "draft")
    drafter = checkpoint.load(tmp_path / "draft", target)
    assert drafter.family == layout.family
    proposal = propose(drafter, target)
    assert proposal.lengths.tolist() == [K] and proposal.logits is not None
    drafted = proposal.tokens[0].tolist()
    expected = layout.reference(made.config, made.tensors, target, TEXT, drafted)
    q = proposal.logits[0].double()
    ids = torch.arange(288) if drafter.vocab_map is None else drafter.vocab_map
    others = torch.ones(288, dtype=torch.bool).index_fill(0, ids, False)
    assert (q[:, others] == -torch.inf).all()
    torch.testing.assert_close(
        q[:, ids].log_softmax(-1), expected.log_softmax(-1), rtol=1e-4, atol=1e-4
    )
    unrolled = unrolled_logits(drafter, target, TEXT, drafted).double()
    torch.testing.assert_close(unrolled.log_softmax(-1), q.log_softmax(-1), rtol=1e-4, atol=1e-4)
    checkpoint.save(drafter, tmp_path / "again", target)
    again = propose(checkpoint.load(tmp_path / "again", target), target)
    assert again.tokens.tolist() == proposal.tokens.tolist()
    torch.testing.assert_close(again.logits, proposal.logits)


@pytest.mark.parametrize("name", [name for name in EAGLE3 if name != "plain"])
def test_a_variant_is_not_the_plain_draft(name: str, target: Target) -> None:
    plain, varied = (
        eagle3_reference(made.config, made.tensors, target, TEXT, [5, 6])
        for made in (eagle3(target, {}), eagle3(target, EAGLE3[name]))
    )
    assert float((plain - varied).abs().max()) > 0.05


def test_an_lstm_speculator_is_refused(target: Target, tmp_path: Path) -> None:
    made = snowflake(target)
    made.config["method"] = "sum_lstm"
    made.write(tmp_path)
    with pytest.raises(UserError, match=r"has method='sum_lstm'.*use a draft with sum_rnn"):
        checkpoint.load(tmp_path, target)


def test_the_page_of_drafts_has_every_layout() -> None:
    assert PAGE.read_text() == page()
