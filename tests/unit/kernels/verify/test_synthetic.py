from __future__ import annotations

import torch

from draftsmith.kernels.verify.lossy import verify_synthetic


def test_drafts_are_kept_at_the_given_rates_whatever_they_are() -> None:
    count, rates = 20000, (0.9, 0.5)
    lengths = torch.full((count,), 4)
    lengths[::2] = 1
    p_logits = torch.zeros(int((lengths + 1).sum()), 5)
    drafts = torch.randint(5, (count, 4), generator=torch.Generator().manual_seed(0))
    verdict = verify_synthetic(
        p_logits, drafts, lengths, None, torch.arange(count), torch.zeros(count).long(), rates=rates
    )
    deep = verdict.accepted[1::2]
    for position, rate in enumerate((0.9, 0.5, 0.5, 0.5)):  # the last rate goes on
        reached = (deep >= position).sum()
        share = (deep > position).sum() / reached
        assert abs(share - rate) < 5 * (rate * (1 - rate) / reached) ** 0.5
    assert int(verdict.accepted[::2].max()) == 1
    kept = torch.arange(5) < verdict.accepted[:, None]
    assert torch.equal(verdict.tokens[:, :4][kept[:, :4]], drafts[kept[:, :4]])
