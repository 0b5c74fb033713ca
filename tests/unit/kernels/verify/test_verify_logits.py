"""Chains verified from raw logits by each backend: the reference's tokens, or none."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose, round_seeds, sample, uniform
from draftsmith.kernels.verify import chain_triton, rows_triton
from draftsmith.kernels.verify.chain import _kernel, verify_logits, verify_logits_compiled
from draftsmith.kernels.verify.chain_triton import verify_logits_triton
from draftsmith.kernels.verify.verdict import Drafts
from tests.goodness import g_test

compiler = pytest.mark.skipif(_kernel() is None, reason="there is no C++ compiler")
BACKENDS = {"cpu": verify_logits_compiled, "triton": verify_logits_triton}
# Rounds of each: interpreted, one takes a tenth of a second.
SEEDS = {"cpu": 60, "triton": 3}
every_backend = pytest.mark.parametrize("backend", [pytest.param("cpu", marks=compiler), "triton"])
FILTERS: list[dict[str, Any]] = [
    {}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.02},
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Triton, so that small vocabularies have several; the last one is not full."""
    monkeypatch.setattr(chain_triton, "BLOCK", 16)


class Case(NamedTuple):
    logits: torch.Tensor  # [R, V]
    rows: SamplingRows
    drafts: Drafts | None
    seeds: torch.Tensor
    positions: torch.Tensor

    def decided(
        self, backend: str = "cpu", logits: torch.Tensor | None = None
    ) -> list[list[int]] | None:
        found = BACKENDS[backend](self._logits(logits), *self[1:])
        return None if found is None else found.tolist()

    def reference(self, logits: torch.Tensor | None = None) -> list[list[int]]:
        return verify_logits(self._logits(logits), *self[1:], impl="torch").tolist()

    def _logits(self, logits: torch.Tensor | None) -> torch.Tensor:
        return self.logits if logits is None else logits


def case(
    seed: int,
    *,
    rows: int = 3,
    drafting: int = 2,
    depth: int = 3,
    size: int = 300,
    scale: float = 3.0,
    near: float = 1.0,
    drawn: bool = True,
    any_token: bool = False,
    filters: dict[str, Any] | None = None,
    greedy: bool = False,
    spare: int = 0,
) -> Case:
    """Targets `near` to the drafts' distributions; the last row that drafts is greedy where there
    are several, or all are. `spare` more rows of logits than drafts belong to each that drafts."""
    generator = torch.Generator().manual_seed(seed)
    raw = scale * torch.randn(drafting, depth, size, generator=generator)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 100_000, (rows,), generator=generator)
    options = {name: [value] * rows for name, value in (filters or {}).items()}
    temperature = [0.0 if greedy else (1.0, 0.7, 1.4)[row % 3] for row in range(rows)]
    if drafting > 1:
        temperature[drafting - 1] = 0.0
    sampling = SamplingRows.of(temperature, **options)
    own = round_seeds(seeds[:drafting], positions[:drafting])
    q = [process(raw[:, at], sampling.select(slice(drafting))) for at in range(depth)]
    tokens = [
        sample(one, own, positions[:drafting] + at, Purpose.DRAFT) for at, one in enumerate(q)
    ]
    drafted = torch.stack(tokens, dim=1)
    if any_token:
        drafted = torch.randint(-1, size, drafted.shape, generator=generator)
    lengths = torch.randint(0, depth + 1, (drafting,), generator=generator)
    lasts = scale * torch.randn(rows, 1, size, generator=generator)
    beyond = torch.full((spare, size), math.nan)
    parts = [torch.cat([raw[row, : lengths[row]], lasts[row], beyond]) for row in range(drafting)]
    logits = torch.cat([*parts, *lasts[drafting:]])
    logits += near * torch.randn(logits.shape, generator=generator)
    drafts = Drafts(drafted, lengths, torch.stack(q, dim=1) if drawn else None, lengths + spare)
    return Case(logits, sampling, drafts, seeds, positions)


@compiler
@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(2, 4),
    drafting=st.integers(1, 2),
    depth=st.integers(1, 4),
    size=st.sampled_from([1, 2, 15, 100, 513, 2048]),
    scale=st.sampled_from([0.1, 3.0, 20.0]),
    near=st.sampled_from([0.0, 1e-4, 0.3, 3.0]),
    drawn=st.booleans(),
    any_token=st.booleans(),
    filters=st.sampled_from(FILTERS),
    spare=st.integers(0, 2),
)
def test_what_the_kernel_decides_is_what_torch_decides(**options: Any) -> None:
    given = case(**options)
    found = given.decided()
    if found is not None:
        assert found == given.reference()


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize(
    ("backend", "filters"),
    [*(pytest.param("cpu", filters, marks=compiler) for filters in FILTERS), ("triton", {})],
)
def test_a_backend_decides_nearly_always_and_as_torch(
    filters: dict[str, Any], drawn: bool, backend: str, poisoned_empty: None
) -> None:
    decided, kept = 0, set()
    for seed in range(SEEDS[backend]):
        size = 300 if backend == "cpu" else 50
        given = case(seed, filters=filters, drawn=drawn, near=0.5, size=size, spare=seed % 2)
        found = given.decided(backend)
        if found is not None:
            decided += 1
            assert found == given.reference()
            kept |= {tokens[0] for tokens in found}
    assert decided >= 0.9 * SEEDS[backend]
    assert len(kept) >= (4 if drawn and backend == "cpu" else 2)


def test_filtered_rounds_in_triton(poisoned_empty: None) -> None:
    """The last one of whole numbers, so that sets end within ties."""
    kept = set()
    for seed, filters in enumerate([*FILTERS[1:], {"top_p": 0.6}]):
        given = case(
            seed, filters=filters, drawn=seed != 1, near=0.5, size=50, depth=2, spare=seed % 2
        )
        logits = given.logits.round() if seed == 4 else given.logits
        found = given.decided("triton", logits)
        assert found is not None and found == given.reference(logits)
        kept |= {tokens[0] for tokens in found}
    assert {0, 1} <= kept


@every_backend
@pytest.mark.parametrize("drawn", [True, False])
def test_greedy_rows_keep_what_the_target_chooses(drawn: bool, backend: str) -> None:
    """With equal logits, of which the first counts, and infinite ones."""
    kept = set()
    for seed in range(40 if backend == "cpu" else 6):
        given = case(seed, size=40, greedy=True, drawn=drawn, near=0.3, spare=seed % 2)
        logits = given.logits.round()
        logits[seed % len(logits), seed % 40] = (math.inf, math.nan)[seed % 2]
        found = given.decided(backend, logits)
        assert found is not None and found == given.reference(logits)
        kept |= {row[0] for row in found}
    assert {0, 1, 2} <= kept


@every_backend
def test_logits_that_are_not_finite(backend: str) -> None:
    for seed in range(40 if backend == "cpu" else 3):
        given = case(seed, size=60)
        logits = given.logits.clone()
        generator = torch.Generator().manual_seed(seed)
        for value in (math.nan, -math.inf):
            logits[torch.rand(logits.shape, generator=generator) < 0.1] = value
        found = given.decided(backend, logits)
        assert found is not None
        assert found == given.reference(logits)


def test_broken_distributions_are_survived_in_triton() -> None:
    for seed in range(3):
        given = case(seed, size=50)
        assert given.drafts is not None and given.drafts.logits is not None
        given.logits[seed] = math.nan
        given.drafts.logits[0, 0], given.drafts.logits[1, 1, 4:] = math.nan, -math.inf
        given.drafts.tokens[1, 2] = -1
        assert given.decided("triton") == given.reference()
    nothing = torch.full_like(given.logits, math.nan)
    found = given.decided("triton", nothing)
    assert found == given.reference(nothing)
    assert found is not None and [row[:2] for row in found] == [[0, -1]] * 3


def test_rows_without_drafts_draw_bonus_tokens_of_their_own_in_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And first rows of more requests than a program adds up by itself."""
    given = case(5, size=50)
    together = given.decided("triton")
    last = given.rows.select(slice(2, 3)), None, given.seeds[2:], given.positions[2:]
    alone = verify_logits(given.logits[-1:], *last, impl="torch")
    assert together is not None and together[2][:2] == alone[0].tolist()
    monkeypatch.setattr(rows_triton, "MOST_SUMMED", 2)
    assert given.decided("triton") == together


@compiler
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_rows_without_a_distribution_are_left_to_torch(value: float) -> None:
    given = case(0)
    logits = torch.full_like(given.logits, value)
    assert given.decided(logits=logits) in (None, given.reference(logits))


@compiler
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("row", range(3))
def test_requests_without_a_distribution_leave_the_others_to_the_kernel(
    row: int, drawn: bool
) -> None:
    given = case(0, drawn=drawn, spare=1)
    assert given.drafts is not None
    logits, begin = given.logits.clone(), int((given.drafts.sizes[:row] + 1).sum())
    logits[begin] = math.nan
    found = given.decided(logits=logits)
    assert found is not None and found == given.reference(logits)
    assert [tokens[:2] == [0, -1] for tokens in found] == [row == at for at in range(3)]


@compiler
def test_a_test_on_its_threshold_is_left_to_torch() -> None:
    """p and q are such that u is p(x) / q(x) up to a rounding of float32."""
    seeds, positions = torch.tensor([5]), torch.tensor([9])
    u = uniform(seeds, positions, Purpose.ACCEPT).item()
    p = torch.tensor([[math.log(u), math.log(1 - u)]] * 2)
    one = torch.tensor([1])
    given = Case(
        p, SamplingRows.of([1.0]), Drafts(torch.tensor([[0]]), one, None, one), seeds, positions
    )
    assert given.decided() is None
    for change, kept in ((1e-3, 1), (-1e-3, 0)):
        found = given.decided(logits=p + torch.tensor([change, 0.0]))
        assert found is not None
        assert found[0][0] == kept


@compiler
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("filters", FILTERS)
def test_tokens_follow_the_targets_distribution_of_float64(
    filters: dict[str, Any], biased: bool
) -> None:
    """20,000 rounds with one draft of a distribution of its own; the negative control is told of
    another q than the one that was drawn from."""
    count, part, size = 20_000, 200, 12
    raw_p, raw_q = 1.5 * torch.randn(2, size, generator=torch.Generator().manual_seed(3))
    options = {name: [value] * part for name, value in filters.items()}
    rows = SamplingRows.of([0.9] * part, **options)
    q = process(raw_q.expand(part, -1), rows)
    told = q[:, None] - (2.0 * (torch.arange(size) == q[0].argmax()) if biased else 0.0)
    ones, counts, decided = torch.ones(part, dtype=torch.int64), torch.zeros(size), 0
    for begin in range(0, count, part):
        seeds, positions = torch.arange(begin, begin + part), torch.full((part,), 7)
        tokens = sample(q, round_seeds(seeds, positions), positions, Purpose.DRAFT)[:, None]
        logits = raw_p.expand(2 * part, -1).contiguous()
        given = Case(logits, rows, Drafts(tokens, ones, told, ones), seeds, positions)
        found = given.decided()
        decided += found is not None
        first = [row[1] for row in (given.reference() if found is None else found)]
        counts += torch.bincount(torch.tensor(first), minlength=size)
    assert decided > 0.9 * count / part  # one row of a part that is not makes it torch's
    probs = process(raw_p[None].double(), rows.select(slice(1)))[0].double().softmax(-1)
    p_value = g_test(counts, probs).p_value
    assert p_value < 1e-9 if biased else p_value > 1e-4
