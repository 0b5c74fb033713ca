"""P-EAGLE: slot by slot what a plain EAGLE-3 head gives when it is fed mask inputs by hand, one
pass a round, and its files."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.peagle import Peagle
from draftsmith.drafters.interface import Proposal
from draftsmith.drafters.options import PeagleOptions
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.sampling.filters import SamplingRows, process
from tests.conftest import merge_json
from tests.first_rounds import first_round
from tests.noise import noisy
from tests.unrolled import unroll_batch

TARGET_DTYPE = torch.float64
K = 4
MASK = 7


@pytest.fixture(scope="module")
def drafter(target) -> Peagle:
    options = PeagleOptions(num_hidden_layers=2, mask_token=MASK)
    made = Peagle.create(options, target, seed=0).to(device=target.device, dtype=torch.float64)
    return noisy(made, 2)


def propose(drafter: Peagle, target: Target, text: list[int], k: int) -> Proposal:
    return drafter.propose(first_round(drafter, target, [text], [k]))


@torch.no_grad()
@pytest.mark.parametrize("segments", [None, [0] * 30 + [1] * 40])
def test_masks_stand_where_they_draft_what_counts_and_nowhere_else(
    segments, drafter, target, monkeypatch
):
    ids = torch.randint(3, 288, (1, 70), generator=torch.Generator().manual_seed(1))
    numbers = None if segments is None else torch.tensor([segments])
    read, step = [], drafter.step
    monkeypatch.setattr(
        drafter,
        "step",
        lambda embeds, *rest: (read.append(embeds.shape[1]), step(embeds, *rest))[1],
    )
    found = []
    for first in (0, 40):
        batch = unroll_batch(drafter, target, ids, K, segments=numbers, first=first)
        # they predict the tokens from 40 on
        found.append([one.hidden[:, 38:] for one in drafter.unroll(batch)])
    assert read == [70 * K, 35 + 35 * K]
    for whole, part in zip(*found, strict=True):
        torch.testing.assert_close(whole, part)


@torch.no_grad()
def test_slots_are_eagle3_steps_over_mask_inputs(drafter, target):
    """One slot after another through the head's own step, as an engine that does not draft in
    parallel would run it."""
    text = torch.randint(3, 288, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    proposal = propose(drafter, target, text, K)
    ids = torch.tensor([text])
    taps, _ = target.states(ids, torch.ones_like(ids), drafter.taps)
    pool, table = drafter.new_pool(8, 4, torch.device("cpu"), torch.float64), torch.arange(8)[None]
    inputs = [(token, drafter.fuse(taps[0, place])) for place, token in enumerate(text[1:])]
    inputs += [(MASK, drafter.fuse(drafter.mask_hidden[0]))] * (K - 1)
    for place, (token, hidden) in enumerate(inputs):
        at = torch.tensor([place])
        context = PagedPass(pool, table, at, torch.tensor([1]))
        step = drafter.step(
            drafter.embed(torch.tensor([[token]])), hidden[None, None], at[None], context
        )
        depth = place - (len(text) - 2)
        if depth >= 0:
            distribution = process(
                step.head_input[0] @ drafter.head_weight().T, SamplingRows.of([1.0])
            )[0].softmax(-1)
            torch.testing.assert_close(
                proposal.logits[0, depth].softmax(-1), distribution, atol=1e-5, rtol=1e-4
            )
    assert depth == K - 1


@torch.no_grad()
def test_a_draft_depends_neither_on_k_nor_on_the_drafts_before_it(drafter, target):
    text = [9, 8, 7, 6, 5]
    short, long = propose(drafter, target, text, 2), propose(drafter, target, text, K)
    torch.testing.assert_close(short.logits[0], long.logits[0, :2], atol=1e-6, rtol=1e-6)


@pytest.fixture
def folder(target, tmp_path):
    drafter = Peagle.create(PeagleOptions(num_hidden_layers=1, mask_token=MASK), target, seed=0)
    checkpoint.save(drafter, tmp_path, target)
    (tmp_path / "draftsmith.json").unlink()
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"mask_token_id": None, "parallel_drafting": None, "ptd_token_id": MASK},
        {"mask_token_id": None, "pard_token": MASK},
        {"architectures": ["PEagleDraftModel"], "parallel_drafting": None},
    ],
)
def test_drafts_of_other_trainers_are_known_by_their_config(change, folder, target):
    merge_json(folder / "config.json", change)
    loaded = checkpoint.load(folder, target)
    assert isinstance(loaded, Peagle) and loaded.mask_token == MASK


@pytest.mark.parametrize(
    ("change", "words"),
    [({"mask_token_id": None}, "'mask_token_id'"), ({"mask_token_id": 288}, "'mask_token' is 288")],
)
def test_what_cannot_be_served_is_refused(change, words, folder, target):
    merge_json(folder / "config.json", change)
    with pytest.raises(UserError, match=words):
        checkpoint.load(folder, target)
