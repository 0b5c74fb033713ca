"""What of a record survives being stored: all of it, but for half a step of a surprisal."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.distill.buffer import record_table
from draftsmith.distill.buffer.record_table import STEPS, from_table, to_table
from draftsmith.record import SCHEMA_VERSION, RecordedTaps, RoundRecord
from tests.round_records import Distribution, each, file_of, logged, of_logits

BASE = RoundRecord(
    "r", round=0, request_class="code", target="t", target_revision="rev", draft_version="v1",
    time_s=100.5, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, position=2, context=[5, 6],
    drafted=[7, 8, 9], accepted=2, committed=[7, 8, 4], emitted=4, share=0.3,
)  # fmt: skip


def record(**changes: object) -> RoundRecord:
    return dataclasses.replace(BASE, **changes)


def even(width: int, log_norm: float = 0.0) -> Distribution:
    return (
        Distribution(
            list(range(1, width + 1)),
            [float(np.log(0.9 / width))] * width,
            0.1,
            log_norm,
            None if width == 2 else -float(width),
        )
        if width
        else Distribution()
    )


def assert_same(left: RoundRecord, right: RoundRecord) -> None:
    for field in dataclasses.fields(RoundRecord):
        told, found = getattr(left, field.name), getattr(right, field.name)
        if field.name not in ("p", "q"):
            assert (
                found == pytest.approx(told, rel=1e-6) if isinstance(told, float) else found == told
            )
            continue
        assert len(told) == len(found)
        for a, b in zip(each(told), each(found)):
            assert a.ids == b.ids and (a.tail, a.log_norm) == pytest.approx(
                (b.tail, b.log_norm), rel=1e-6
            )
            assert a.drafted == b.drafted
            assert np.allclose(a.logprobs, b.logprobs, rtol=0, atol=0.5001 / STEPS)


ROWS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 6), st.floats(0, 1)), max_size=12
)


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_ragged_records_come_back(shapes: list[tuple[int, int, int, float]]) -> None:
    records = [
        record(
            request=str(index),
            p=logged(*[even(width, share)] * depth),
            q=logged(*[even(1)] * depth),
            context=list(range(length)),
            drafted=[3] * depth,
            share=share,
            last=bool(length % 2),
            seeded=bool(depth % 2),
            rule="chain" if depth % 2 else "",
            engine="e1" if width % 2 else "",
            sampler="greedy" if depth % 2 else "",
            weight_version="7" if width % 2 else "",
        )
        for index, (depth, length, width, share) in enumerate(shapes)
    ]
    back = from_table(pq.read_table(io.BytesIO(file_of(records))))
    assert len(back) == len(records)
    for left, right in zip(records, back, strict=True):
        assert_same(left, right)
    again = from_table(to_table(back))
    assert [each(one.p) for one in again] == [each(one.p) for one in back], (
        "stored twice, it changes no more"
    )


def alphas(record: RoundRecord) -> np.ndarray:
    """sum_v min(p_v, q_v) over the stored tokens."""
    found = []
    for p, q in zip(each(record.p), each(record.q), strict=True):
        other = dict(zip(q.ids, q.logprobs))
        found.append(
            sum(
                np.exp(min(value, other.get(token, -np.inf)))
                for token, value in zip(p.ids, p.logprobs)
            )
        )
    return np.array(found)


def test_alpha_of_stored_distributions_is_exact_to_a_thousandth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    # flat distributions, where every token's error counts, to peaked ones
    spread = torch.linspace(0.1, 8, 40)[:, None]
    p = spread * torch.randn(40, 500, generator=generator)
    one = record(p=of_logits(p), q=of_logits(p + 0.5 * torch.randn(40, 500, generator=generator)))
    exact = alphas(one)
    assert np.abs(alphas(*from_table(to_table([one]))) - exact).max() < 0.5 / STEPS + 1e-5
    monkeypatch.setattr(record_table, "STEPS", 16)
    assert np.abs(alphas(*from_table(to_table([one]))) - exact).max() > 1e-3, (
        "a coarser step must show"
    )


def test_a_token_of_next_to_no_probability_stays_one() -> None:
    (back,) = from_table(
        to_table(
            [
                record(
                    p=logged(Distribution([4, 5], [0.0, -900.0], 0.0)),
                    q=logged(Distribution([4], [0.0], 0.0)),
                )
            ]
        )
    )
    (p,) = each(back.p)
    assert p.ids == [4, 5] and p.logprobs[0] == 0.0 and -64.0 <= p.logprobs[1] < -63.9


def test_records_of_another_schema_are_refused() -> None:
    with pytest.raises(ValueError, match=f"schema {SCHEMA_VERSION + 1}, this is {SCHEMA_VERSION}"):
        from_table(to_table([record(), record(schema=SCHEMA_VERSION + 1)]))
    with pytest.raises(ValueError, match="lacks column 'sampler'"):
        from_table(to_table([record()]).drop_columns(["sampler"]))


def states(*, begin: int = 0, seed: int = 0) -> RecordedTaps:
    values = np.random.default_rng(seed).integers(0, 2**16, (3, 8), dtype=np.uint16)
    return RecordedTaps((1, -1), begin, values)


def test_states_come_back_to_the_bit_and_are_left_unread_where_nobody_needs_them() -> None:
    records = [record(taps=states()), record(round=1), record(round=2, taps=states(begin=3))]
    data = io.BytesIO(file_of(records))
    back = from_table(record_table.read(data))
    assert back[1].taps is None and back[1].tap_bytes == 0
    for index, begin in ((0, 0), (2, 3)):
        found = back[index].taps
        assert (found.layers, found.begin) == ((1, -1), begin)
        assert found.values.dtype == np.uint16
        np.testing.assert_array_equal(found.values, states().values)
        assert back[index].tap_bytes == 48
    assert not any(one.taps for one in from_table(record_table.read(data, with_taps=False)))


def test_a_position_takes_half_a_kilobyte() -> None:
    """Distributions like a small model's: the room that a position takes when records are written
    as the server writes them."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(600, 4096, generator=generator)
    records = [
        record(
            round=number,
            p=of_logits(logits[3 * number : 3 * number + 3]),
            q=of_logits(logits[3 * number : 3 * number + 3] + 1),
        )
        for number in range(200)
    ]
    assert len(file_of(records)) / 600 < 512
