from __future__ import annotations

from random import Random

import pytest
import torch

from draftsmith.kernels.overlap import walk_rounds
from draftsmith.train.objective.rounds_of_text import answers, deepen, predicted_tau, stretches


def simulate(keep: list[list[float]], chance: Random) -> tuple[int, list[int], list[int]]:
    """One text emitted round by round: rounds, and offered and accepted per position."""
    num_tokens, depth = len(keep), len(keep[0])
    rounds, offered, accepted, start = 0, [0] * depth, [0] * depth, 0
    while start < num_tokens:
        rounds += 1
        kept = 0
        while kept < depth and start + kept < num_tokens:
            offered[kept] += 1
            if chance.random() >= keep[start][kept]:
                break
            accepted[kept] += 1
            kept += 1
        start += kept + 1
    return rounds, offered, accepted


def test_walked_rounds_match_a_simulation():
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(9, 3, generator=generator)
    walked = walk_rounds(keep)
    expected_num = float(walked.rounds.sum())
    chance, chances = Random(0), keep.tolist()
    runs = [simulate(chances, chance) for _ in range(4000)]
    rounds = torch.tensor([run[0] for run in runs], dtype=torch.float64)
    # Five standard errors of each simulated mean.
    assert abs(rounds.mean() - expected_num) < 5 * rounds.std() / len(runs) ** 0.5
    for at, expected in ((1, walked.offered.sum(dim=0)), (2, walked.accepted.sum(dim=0))):
        simulated = torch.tensor([run[at] for run in runs], dtype=torch.float64)
        error = 5 * simulated.std(dim=0) / len(runs) ** 0.5 + 1e-9
        assert bool(((simulated.mean(dim=0) - expected).abs() < error).all())


def test_walked_rounds_commit_the_text_and_no_more():
    keep = torch.rand(9, 3, generator=torch.Generator().manual_seed(1))
    walked = walk_rounds(keep)
    assert float(walked.committed.sum()) == pytest.approx(9, abs=1e-12)
    # Rounds begin at 0, 4 and 8; the last has one token left of its four.
    assert walk_rounds(torch.ones(9, 3)).committed.tolist() == [4, 0, 0, 0, 4, 0, 0, 0, 1]


def test_walked_rounds_of_certain_drafts():
    walked = walk_rounds(torch.ones(7, 3))
    # Rounds begin at 0 and 4; the second is offered its three tokens 4, 5, 6 and ends the text.
    assert walked.rounds.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert walked.offered.sum(dim=0).tolist() == [2.0, 2.0, 2.0]
    never = walk_rounds(torch.zeros(7, 3))
    assert never.rounds.sum() == 7.0 and never.accepted.sum() == 0.0


def test_answers_are_cut_at_the_mask_and_anchored():
    keep = torch.arange(1.0, 13.0).view(6, 2) / 100
    mask = torch.tensor([0, 1, 1, 0, 1, 1], dtype=torch.bool)
    assert stretches(mask) == [(1, 3), (4, 6)]
    first, second = answers(keep, mask)
    # Entry [i, s] is the token at j0 + i + s drafted at depth s; past the end there is none.
    assert torch.equal(
        first,
        torch.stack(
            [torch.stack([keep[1, 0], keep[2, 1]]), torch.stack([keep[2, 0], torch.tensor(0.0)])]
        ),
    )
    assert torch.equal(second[0], torch.stack([keep[4, 0], keep[5, 1]]))


def test_predicted_tau_weighs_tokens_not_texts():
    keep = torch.ones(2, 8, 3)
    keep[1] = 0.0
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, :8] = True
    mask[1, 4:] = True
    # 8 tokens in 2 rounds, 4 tokens in 4 rounds.
    assert predicted_tau(keep, mask) == pytest.approx(12 / 6)
    assert predicted_tau(keep, torch.zeros(2, 8, dtype=torch.bool)) is None


def test_deepen_repeats_the_last_depth_and_cuts():
    keep = torch.rand(2, 5, 2)
    assert torch.equal(deepen(keep, 1), keep[..., :1])
    assert torch.equal(deepen(keep, 4)[..., 3], keep[..., 1])
