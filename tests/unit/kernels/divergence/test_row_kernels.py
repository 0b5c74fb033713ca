"""The row kernels, compiled and in Triton, against the reference in float64, for every divergence
that each computes; then what the compiled one leaves to torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.divergence import rows as rows_module
from draftsmith.kernels.divergence.fused import SharedLogits, divergence
from draftsmith.kernels.divergence.kind import PARAMETERS, DivergenceKind, kind_of
from draftsmith.kernels.divergence.rows import (
    CODES,
    RowInputs,
    RowTerms,
    divergence_rows,
    divergence_rows_compiled,
    divergence_terms,
    draft_columns,
)

compiler = pytest.mark.skipif(
    rows_module._kernel(torch.float32, torch.float32) is None, reason="there is no C++ compiler"
)
every_kind = pytest.mark.parametrize(
    "kind", [kind_of(name) for name in CODES], ids=lambda kind: kind.metric
)
TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]
WHICH = [0, 0, 1, 2, 2, 2, 3]  # target row of each row


class Case(NamedTuple):
    rows: RowInputs

    def copied(self, device: torch.device | None = None) -> RowInputs:
        rows = self.rows._replace(draft_logits=self.rows.draft_logits.clone())
        return RowInputs(*(None if one is None else one.to(device or "cpu") for one in rows))

    def in_float64(self) -> RowInputs:
        draft, target, weights = (one.double() for one in self.rows[:3])
        return self.rows._replace(draft_logits=draft, target_logits=target, weights=weights)


def make_case(
    num_draft: int,
    num_target: int,
    types: tuple[torch.dtype, torch.dtype] = TYPES[0],
    *,
    which: Sequence[int] | None = WHICH,
    subset: bool = False,
) -> Case:
    """Row 3 has no weight and NaN for logits; target row 1 rules tokens out; row 6 is nearly
    one-hot."""
    generator = torch.Generator().manual_seed(num_draft + num_target)
    draft = 3 * torch.randn(len(WHICH), num_draft, generator=generator)
    num_distinct = len(WHICH) if which is None else which[-1] + 1
    target = 3 * torch.randn(num_distinct, num_target, generator=generator)
    draft[3], target[1, 2:] = math.nan, -math.inf
    draft[6, 0] = 60.0
    vocab_map = torch.randperm(num_target, generator=generator)[:num_draft] if subset else None
    tokens = torch.randint(num_target, (len(WHICH),), generator=generator)
    return Case(
        RowInputs(
            draft.to(types[0]),
            target.to(types[1]),
            torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 0.25, 1.0]),
            vocab_map,
            draft_columns(tokens, vocab_map),
            None if which is None else torch.tensor(which),
        )
    )


def computed(kind: DivergenceKind, rows: RowInputs) -> RowTerms:
    terms = divergence_rows_compiled(kind, rows)
    assert terms is not None
    return terms


def interpreted(kind: DivergenceKind, rows: RowInputs) -> RowTerms:
    """Of several blocks in small vocabularies too."""
    from draftsmith.kernels.divergence.rows_triton import divergence_rows_triton

    return divergence_rows_triton(kind, rows, block=16 if rows.draft_logits.shape[1] < 99 else 256)


Backend = Callable[[DivergenceKind, RowInputs], RowTerms]
every_kernel = pytest.mark.parametrize(
    ("backend", "kind"),
    [
        pytest.param(backend, kind_of(name), id=f"{kind_of(name).metric}, {label}", marks=marks)
        for label, backend, names, marks in (
            ("compiled", computed, CODES, [compiler]),
            ("triton", interpreted, PARAMETERS, []),
        )
        for name in names
    ],
)


class Rounding(NamedTuple):
    terms: float  # relative, of what float32 sums give
    units: int  # of the loss, in a gradient: a difference of terms as large
    bits: int  # of a gradient in bfloat16


COMPILED = Rounding(1e-5, 4, 8)
# Interpreted, a kernel cuts numbers off where a device rounds them.
TRITON = Rounding(2e-5, 8, 7)


def assert_close(
    kind: DivergenceKind,
    ours: RowTerms,
    exact: RowTerms,
    counted: torch.Tensor,
    rounding: Rounding = COMPILED,
) -> None:
    # Of float32 sums. tvd++ takes roots: that of a small mass has half its digits, and the arc of
    # one within 6e-8 of 1 is known to 5e-4.
    loose = 500 if kind.name == "tvd++" else 1
    for name in ("loss", "alpha", "keep", "outside"):
        found, expected = (getattr(one, name)[counted].double() for one in (ours, exact))
        torch.testing.assert_close(found.cpu(), expected, rtol=rounding.terms, atol=2e-6 * loose)
    rtol = 1e-5 if ours.grad.dtype == torch.float32 else 2.0**-rounding.bits
    unit = torch.finfo(torch.float32).eps * float(exact.loss.max())
    atol = 1e-6 * loose + rounding.units * unit
    torch.testing.assert_close(
        ours.grad.double().cpu(), exact.grad.double(), rtol=rtol * loose, atol=atol
    )


SIZES = [(37, 37, False), (1100, 1100, False), (19, 70, True), (1, 5, True)]


@every_kernel
@pytest.mark.parametrize(
    "num_draft, num_target, subset, types",
    [(*size, types) for size, types in zip(SIZES, TYPES, strict=True)],
)
def test_rows_equal_the_reference_in_float64(
    backend: Backend,
    kind: DivergenceKind,
    types: tuple[torch.dtype, torch.dtype],
    num_draft: int,
    num_target: int,
    subset: bool,
    device: torch.device,
    poisoned_empty: None,
) -> None:
    case = make_case(num_draft, num_target, types, subset=subset)
    exact = divergence_rows(kind, case.in_float64())
    rows = case.copied(torch.device("cpu") if backend is computed else device)
    ours = backend(kind, rows)
    counted = case.rows.weights != 0
    assert_close(kind, ours, exact, counted, COMPILED if backend is computed else TRITON)
    assert torch.equal(ours.grad[3], torch.zeros_like(ours.grad[3])) and ours.loss[3] == 0
    assert ours.grad.data_ptr() == rows.draft_logits.data_ptr(), "a second [t, V] was allocated"


def test_forward_kl_of_logits_far_apart_loses_no_digits(device: torch.device) -> None:
    """Maxima move with every block of 16, the first of which both rule out; each side has another
    constant, which cancels in no sum. Control: it does where x - z are added up as they are."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 3, 70, generator=generator)).sort(dim=-1).values
    draft, target = logits + torch.tensor([1000.0, -500.0])[:, None, None]
    draft[1, :20] = target[1, :20] = -math.inf
    rows = RowInputs(draft, target, torch.ones(3), None, None)
    exact = divergence_rows(kind_of("forward-kl"), Case(rows).in_float64()).loss
    found = interpreted(kind_of("forward-kl"), Case(rows).copied(device)).loss.cpu().double()
    torch.testing.assert_close(found, exact, rtol=5e-6, atol=0)
    plain = target.softmax(-1).mul((target - draft).nan_to_num()).sum(-1)
    plain += draft.logsumexp(-1) - target.logsumexp(-1)
    assert ((plain.double() - exact).abs() > 5e-5 * exact).any()


@compiler
@every_kind
def test_another_target_row_is_noticed(kind: DivergenceKind) -> None:
    """Control of the test above: one row that is held against its neighbour's distribution."""
    case = make_case(37, 37)
    exact = divergence_rows(kind, case.in_float64())
    shifted = case.copied()._replace(which=torch.tensor([0, 1, 1, 2, 2, 2, 3]))
    with pytest.raises(AssertionError):
        assert_close(kind, computed(kind, shifted), exact, shifted.weights != 0)


@compiler
@every_kind
def test_shared_rows_are_rows_of_their_own_to_the_bit(kind: DivergenceKind) -> None:
    case = make_case(37, 70, subset=True)
    shared = computed(kind, case.copied())
    rows = case.copied()
    apart = computed(kind, rows._replace(target_logits=rows.target_logits[rows.which], which=None))
    counted = rows.weights != 0
    for name in RowTerms._fields:
        assert torch.equal(getattr(shared, name)[counted], getattr(apart, name)[counted])


@compiler
@every_kind
@pytest.mark.parametrize("side", ["draft_logits", "target_logits"])
def test_a_nan_of_a_row_that_counts_is_told(kind: DivergenceKind, side: str) -> None:
    case = make_case(37, 37)
    broken = case.copied()
    getattr(broken, side)[0, 5] = math.nan
    exact = divergence_rows(kind, broken._replace(draft_logits=broken.draft_logits.clone()))
    ours = computed(kind, broken)
    for name in RowTerms._fields:
        found, expected = (getattr(one, name).isnan() for one in (ours, exact))
        assert found[expected].all(), name
        assert not found[2].any() and not found[4:].any(), name  # rows 0 and 1 share theirs
    assert exact.alpha[0].isnan()


@compiler
@every_kind
def test_rows_do_not_depend_on_the_number_of_threads(
    kind: DivergenceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(1100, 1100)
    one = computed(kind, case.copied())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    three = computed(kind, case.copied())
    counted = case.rows.weights != 0
    assert all(torch.equal(a[counted], b[counted]) for a, b in zip(one, three, strict=True))


finite = st.floats(-300, 300, width=32)


@compiler
@every_kind
@settings(max_examples=40, deadline=None)
@given(
    logits=st.integers(1, 8).flatmap(
        lambda size: st.tuples(
            st.lists(finite, min_size=size, max_size=size),
            st.lists(finite, min_size=size, max_size=size),
            st.integers(-1, size - 1),
        )
    )
)
def test_any_logits_give_the_reference(
    kind: DivergenceKind, logits: tuple[list[float], list[float], int]
) -> None:
    draft, target, column = logits
    rows = RowInputs(
        torch.tensor([draft]), torch.tensor([target]), torch.ones(1), None, torch.tensor([column])
    )
    exact = divergence_rows(kind, Case(rows).in_float64())
    ours = computed(kind, rows)
    assert ours.grad.isfinite().all()
    torch.testing.assert_close(ours.alpha.double(), exact.alpha, rtol=1e-5, atol=1e-6)
    if kind.name != "tvd++":  # which takes the root of masses as small as rounding
        torch.testing.assert_close(ours.loss.double(), exact.loss, rtol=1e-5, atol=1e-5)


def test_without_tokens_nothing_is_kept(device: torch.device) -> None:
    tv, rows = kind_of("tv"), make_case(37, 37).copied(device)._replace(columns=None)
    reference = divergence_rows(tv, rows._replace(draft_logits=rows.draft_logits.clone()))
    ours = interpreted(tv, rows)
    assert ours.keep is None
    torch.testing.assert_close(ours.grad, reference.grad)
    with pytest.raises(ValueError, match="needs the tokens"):
        interpreted(kind_of("ce"), rows)


@compiler
def test_what_no_kernel_computes_is_left_to_torch() -> None:
    case = make_case(37, 37)
    tv = kind_of("tv")
    assert set(PARAMETERS) - set(CODES) == {"jsd"}
    assert divergence_rows_compiled(kind_of("jsd"), case.copied()) is None
    assert divergence_rows_compiled(tv, case.in_float64()) is None
    assert (
        divergence_rows_compiled(
            tv, case.rows._replace(target_logits=case.rows.target_logits.half())
        )
        is None
    )
    strided = case.rows._replace(draft_logits=torch.randn(37, 7).T)
    assert divergence_rows_compiled(tv, strided) is None
    with pytest.raises(ValueError, match="needs the tokens"):
        divergence_terms(kind_of("ce"), case.rows._replace(columns=None))


@compiler
def test_indices_of_32_bits_are_read_as_such() -> None:
    case, tv = make_case(19, 70, subset=True), kind_of("tv")
    wide, rows = computed(tv, case.copied()), case.copied()
    narrow = rows._replace(
        **{name: getattr(rows, name).int() for name in ("vocab_map", "columns", "which")}
    )
    counted = rows.weights != 0
    for ours, expected in zip(computed(tv, narrow), wide, strict=True):
        assert torch.equal(ours[counted], expected[counted])


OUT_OF_PLACE = {
    "map beyond the vocabulary": ("vocab_map", 4, 70),
    "map below 0": ("vocab_map", 4, -1),
    "token beyond the draft's": ("columns", 2, 19),
    "target row beyond the last": ("which", 6, 4),
    "target row below 0": ("which", 0, -1),
    "target rows that fall": ("which", 4, 1),
}
MISFITS: list[dict[str, object]] = [
    *({name: slice(-1)} for name in ("vocab_map", "columns", "which", "weights")),
    {"vocab_map": None},
    {"which": None},
]


@compiler
def test_what_does_not_fit_is_left_to_torch() -> None:
    """Indices out of place, parts of another size, and those that lack where sizes differ."""
    case, tv = make_case(19, 70, subset=True), kind_of("tv")
    for name, at, value in OUT_OF_PLACE.values():
        rows = case.copied()
        changed = getattr(rows, name).clone()
        changed[at] = value
        assert divergence_rows_compiled(tv, rows._replace(**{name: changed})) is None, name
    for misfit in MISFITS:
        rows = case.copied()
        parts = {
            name: None if part is None else getattr(rows, name)[part]
            for name, part in misfit.items()
        }
        assert divergence_rows_compiled(tv, rows._replace(**parts)) is None, misfit


def test_a_head_of_another_width_is_refused() -> None:
    hidden, head = torch.randn(100, 64), torch.randn(33, 48)
    with pytest.raises(RuntimeError):
        divergence(kind_of("tv"), hidden, head, lambda rows: torch.randn(100, 33), torch.ones(100))


@pytest.mark.parametrize("name", [*CODES, "jsd"])
def test_all_agree_where_rows_share_target_logits(name: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 4, generator=generator).to(device).requires_grad_()
    head = torch.randn(33, 4, generator=generator).to(device).requires_grad_()
    target = torch.randn(3, 33, generator=generator).to(device)
    which = torch.tensor([0, 0, 1, 1, 1, 2], device=device)
    tokens, weights = torch.arange(6, device=device), torch.ones(6, device=device)

    def shared(rows: slice) -> SharedLogits:
        chosen, of_chosen = which[rows].unique(return_inverse=True)
        return SharedLogits(target[chosen], of_chosen)

    results = {}
    for impl, source in (
        ("auto", shared),
        ("triton", shared),
        ("torch", shared),
        ("torch", lambda rows: target[which[rows]]),
    ):
        result = divergence(
            kind_of(name), hidden, head, source, weights, tokens=tokens, impl=impl, chunk_size=4
        )  # fmt: skip
        grads = torch.autograd.grad(result.loss, (hidden, head))
        results[impl, source is shared] = (result.loss, result.keep, *grads)
    expected = results.pop(("torch", False))
    for (impl, _), found in results.items():
        atol = 1e-5 if impl == "triton" else 1e-6
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol)
