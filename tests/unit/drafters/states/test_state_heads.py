"""Medusa and the MLP speculator: depths that are not there, families by configuration, and what is
refused. Their formulas are layouts/test_published.py's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import Proposal
from draftsmith.drafters.options import MedusaOptions, MlpOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.states.medusa import Medusa
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.filters import SamplingRows
from tests.draft_variants import copied_mlp, vllm_medusa
from tests.first_rounds import first_round
from tests.unrolled import unroll_batch


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
    drafter = FAMILIES[family].create(options, target, seed=0)
    proposal = draft_greedily(drafter, target, [5, 6, 7, 8], 4)
    assert proposal.lengths.tolist() == [2] and proposal.tokens[0, 2:].tolist() == [-1, -1]
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    steps = drafter.unroll(unroll_batch(drafter, target, ids, 4))
    assert [bool(step.valid.any()) for step in steps] == [True, True, False, False]


@torch.no_grad()
def test_a_new_medusa_says_what_the_target_says(target):
    """Its blocks start at zero: every head repeats the target's own next token."""
    drafter = Medusa.create(MedusaOptions(num_heads=2, num_layers=2), target, seed=0)
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
