"""What holds of every divergence for any logits that hypothesis thinks of, in float64
and float32."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.divergence.kind import PARAMETERS, DivergenceKind, kind_of
from draftsmith.kernels.divergence.rows import LEAST_DEVIATION, RowInputs, divergence_rows

KINDS = [kind_of(name) for name in PARAMETERS]
finite = st.floats(-300, 300, width=32)
maybe_ruled_out = st.one_of(finite, st.just(-math.inf))


@st.composite
def distributions(draw: st.DrawFn) -> tuple[list[float], list[float], list[int] | None, int]:
    """(draft logits, target logits with some mass, map of the draft vocabulary, text's token)."""
    num_target = draw(st.integers(1, 8))
    target = draw(st.lists(maybe_ruled_out, min_size=num_target, max_size=num_target))
    target[draw(st.integers(0, num_target - 1))] = draw(finite)
    vocab_map = draw(
        st.one_of(
            st.none(), st.permutations(range(num_target)).map(lambda ids: ids[: 1 + len(ids) // 2])
        )
    )
    num_draft = num_target if vocab_map is None else len(vocab_map)
    draft = draw(st.lists(finite, min_size=num_draft, max_size=num_draft))
    return draft, target, vocab_map, draw(st.integers(-1, num_draft - 1))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.metric)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=40, deadline=None)
@given(drawn=distributions())
def test_rows_are_finite_bounded_and_move_no_mass_out_of_nothing(
    kind: DivergenceKind, dtype: torch.dtype, drawn: tuple
) -> None:
    draft, target, vocab_map, column = drawn
    rows = RowInputs(
        torch.tensor([draft], dtype=dtype),
        torch.tensor([target], dtype=dtype),
        torch.ones(1, dtype=dtype),
        None if vocab_map is None else torch.tensor(vocab_map),
        torch.tensor([column]),
    )
    terms = divergence_rows(kind, rows)
    rounding = 1e-3 if dtype == torch.float32 and kind.name == "tvd++" else 1e-5
    assert terms.loss.isfinite().all() and terms.grad.isfinite().all()
    # Forward KL on a part of the vocabulary leaves out a term that alone may be large, so only its
    # whole is never negative.
    if vocab_map is None or kind.name not in ("forward-kl", "lk-hybrid"):
        assert terms.loss >= -rounding
    assert -1e-6 <= terms.alpha <= 1 + 1e-6 and terms.alpha <= 1 - terms.outside + 1e-5
    assert 0 <= terms.keep <= 1 + 1e-6
    # The same amount on all logits changes nothing, so no gradient points that way. tvd++ divides
    # rounding, too.
    scale = 1 / LEAST_DEVIATION if kind.name == "tvd++" else 1.0 + abs(float(terms.loss))
    assert abs(float(terms.grad.double().sum())) <= 100 * torch.finfo(dtype).eps * scale
