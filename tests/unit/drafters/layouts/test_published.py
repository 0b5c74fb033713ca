"""Every published layout: read as it is published, drafting what the published formulas draft in
plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import Proposal, TrainedDrafter
from draftsmith.drafters.options import MedusaOptions, MlpOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.states.medusa import Medusa
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.filters import SamplingRows
from tests.draft_variants import EAGLE3, VARIANTS, copied_mlp, eagle3, vllm_medusa
from tests.first_rounds import first_round
from tests.published_drafts import LAYOUTS, PAGE, Layout, eagle3_reference, page, snowflake
from tests.unrolled import unroll_batch, unrolled_logits

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


# Medusa and the MLP speculator: depths that are not there, families by configuration, refusals


def draft_greedily(drafter, target: Target, text: list[int], k: int) -> Proposal:
    greedy = SamplingRows.of([0.0])
    return drafter.propose(first_round(drafter, target, [text], [k], sampling=greedy))


def final_state(target: Target, text: list[int]) -> torch.Tensor:
    """[H], what the head multiplied to choose the last token of `text`."""
    ids = torch.tensor([text])
    return target.states(ids, torch.ones_like(ids), ())[1][0, -2]


def test_a_tied_copy_that_differs_is_refused(target, tmp_path):
    made = copied_mlp(target)
    made.tensors["speculator.emb.2.weight"][0, 0] += 1
    made.write(tmp_path)
    with pytest.raises(UserError, match=r"'emb.2.weight' .* has no place"):
        checkpoint.load(tmp_path, target)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "options"),
    [("medusa", MedusaOptions(num_heads=2)), ("mlp", MlpOptions(num_predict=2))],
)
def test_depths_beyond_the_last_are_neither_drafted_nor_scored(family, options, target):
    drafter = FAMILIES[family].create(options, target, seed=0).to(target.dtype)
    proposal = draft_greedily(drafter, target, [5, 6, 7, 8], 4)
    assert proposal.lengths.tolist() == [2] and proposal.tokens[0, 2:].tolist() == [-1, -1]
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    steps = drafter.unroll(unroll_batch(drafter, target, ids, 4))
    assert [bool(step.valid.any()) for step in steps] == [True, True, False, False]


@torch.no_grad()
def test_a_new_medusa_says_what_the_target_says(target):
    """Its blocks start at zero: every head repeats the target's own next token."""
    drafter = Medusa.create(MedusaOptions(num_heads=2, num_layers=2), target, seed=0)
    drafter = drafter.to(target.dtype)
    text = [5, 9, 40, 7, 30]
    said = int(target.head(final_state(target, text)).argmax())
    assert draft_greedily(drafter, target, text, 2).tokens[0, 0] == said


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *(("medusa", wrong) for wrong in ({"vocab_size": 7}, {"hidden_size": 7}, {"num_heads": 0})),
        *(("mlp", wrong) for wrong in ({"vocab_size": 7}, {"emb_dim": 7}, {"n_predict": 0})),
    ],
)
def test_a_draft_for_another_target_is_refused(kind, wrong, target, tmp_path):
    made = copied_mlp(target) if kind == "mlp" else vllm_medusa(target, tables=True)
    replace(made, config=made.config | wrong).write(tmp_path)
    with pytest.raises(UserError, match=f"{next(iter(wrong))}|heads and layers"):
        checkpoint.load(tmp_path, target)
