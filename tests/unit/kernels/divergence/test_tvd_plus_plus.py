"""The closed-form gradient of tvd++ is what its published estimator, sampled, tends to."""

from __future__ import annotations

import torch

from draftsmith.kernels.divergence.kind import kind_of
from draftsmith.kernels.divergence.rows import RowInputs, divergence_rows

SAMPLES, VOCAB = 200_000, 12


def test_sampled_policy_gradients_with_normalised_advantages_tend_to_it():
    """Draws x of q, reward r = [q(x) < p(x)], gradient the mean of -(r - mean r) / std r * grad log
    q(x)."""
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.randn(2, 1, VOCAB, generator=generator, dtype=torch.float64)
    q, p = draft.softmax(-1)[0], target.softmax(-1)[0]
    drawn = torch.multinomial(q, SAMPLES, replacement=True, generator=generator)
    reward = (q < p).double()[drawn]
    scores = torch.nn.functional.one_hot(drawn, VOCAB) - q  # gradients of log q(x) to the logits
    each = -((reward - reward.mean()) / reward.std())[:, None] * scores
    sampled, error = each.mean(dim=0), each.std(dim=0) / SAMPLES**0.5

    def exact(kind: str) -> torch.Tensor:
        weights = torch.ones(1, dtype=torch.float64)
        return divergence_rows(
            kind_of(kind), RowInputs(draft.clone(), target.clone(), weights, None, None)
        ).grad[0]

    # Twelve coordinates within five standard errors each: a false alarm in 1e5 seeds.
    assert bool(((sampled - exact("tvd++")).abs() < 5 * error).all())
    # Negative control: without the deviation it is the gradient of TV, which the same test tells
    # apart.
    assert not bool(((sampled - exact("tv")).abs() < 5 * error).all())
    assert torch.allclose(
        exact("tv"), exact("tvd++") * (q[q < p].sum() * (1 - q[q < p].sum())).sqrt(), rtol=1e-9
    )
