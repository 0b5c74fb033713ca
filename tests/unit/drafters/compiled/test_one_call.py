"""A pass of a few tokens as one call: the bits of the same kernels called one by one, and every
other pass left to them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from draftsmith.drafters.compiled import kernel_steps
from draftsmith.drafters.compiled.captured import Replay, capture_lm
from draftsmith.drafters.compiled.one_call import OneCall
from draftsmith.drafters.target.packed_pass import PackedPass
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.attention import paged_compiled
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import TreeLayout
from draftsmith.kernels.products.few_rows import MOST_ROWS, FewRows
from draftsmith.kernels.products.row_steps import row_steps
from tests.paged_texts import read_two

pytestmark = pytest.mark.skipif(row_steps(torch.float32) is None, reason="there is no C++ compiler")
TAPS = (0, 2, 4)


@pytest.fixture(scope="module")
def llama(tiny_target) -> Target:
    """For tests that leave its weights as they are."""
    return made(tiny_target, "llama")


@pytest.fixture
def written(llama) -> Iterator[Target]:
    """For tests that write its weights."""
    weights = [weight.detach().clone() for weight in llama.model.parameters()]
    yield llama
    with torch.no_grad():
        for weight, own in zip(llama.model.parameters(), weights, strict=True):
            weight.copy_(own)
    llama.refresh()


def made(tiny_target, architecture: str, dtype: torch.dtype = torch.float32) -> Target:
    target = Target.load(tiny_target(architecture), dtype=dtype)
    capture_lm(target)
    assert target.captured
    return target


def body(target: Target) -> Replay:
    return target._captured.body


@contextmanager
def one_by_one(target: Target) -> Iterator[None]:
    """Kernels are called from Python."""
    own, body(target)._one_call = body(target)._one_call, None
    try:
        yield
    finally:
        body(target)._one_call = own


@contextmanager
def counted(target: Target, monkeypatch) -> Iterator[list[bool]]:
    """Whether each pass was one call."""
    taken, original = [], OneCall.__call__

    def call(self, *arguments):
        found = original(self, *arguments)
        if self is body(target)._one_call:
            taken.append(found is not None)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(OneCall, "__call__", call)
        yield taken


PASSES = [(5, 9), (1, 1), (4, 2), (1, 0), (0, 8), (3, 3)]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("llama", torch.bfloat16), ("qwen3", torch.float32), ("mistral", torch.float32)],
)
def test_one_call_gives_the_bits_of_many(tiny_target, architecture, dtype, monkeypatch):
    target = made(tiny_target, architecture, dtype)
    with counted(target, monkeypatch) as taken:
        found = read_two(target, PASSES, TAPS).everything
    assert taken == [True] * len(PASSES)
    with one_by_one(target):
        expected = read_two(target, PASSES, TAPS).everything
    if architecture == "llama":
        # Two norms, four products, a gate, two rotations, attention and two sums; before them rows
        # of the embedding and of both tables of angles, one norm behind.
        assert len(body(target)._one_call.calls.calls) == 3 + 12 * target.num_layers + 1
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    # What an earlier pass gave is not written again: all of it was compared after the last one.
    assert not torch.equal(found[2], found[6])


def test_a_forward_with_other_operations_is_replayed(tiny_target):
    assert body(made(tiny_target, "gpt_neox"))._one_call is None


@torch.no_grad()
def test_passes_that_kernels_do_not_take_are_replayed(llama, monkeypatch):
    target = llama
    ids = torch.arange(4, 10)
    positions = torch.arange(6)
    tree = TreeLayout(positions, torch.full((6,), -1), torch.zeros(6, dtype=torch.int64))
    wide = target.new_pool(4, 16, dtype=torch.float64)
    table, six = torch.arange(4)[None], torch.tensor([6])
    pool = target.new_pool(4, 16)
    expected = target.paged(ids[None], positions[None], PagedPass(pool, table, positions, six))
    with counted(target, monkeypatch) as taken:
        for context in (
            PagedPass(target.new_pool(4, 16), table, positions, six),
            PagedPass(target.new_pool(4, 16), table, positions, six, tree=tree),
            PagedPass(target.new_pool(4, 16), table, positions, six, impl="torch"),
            PagedPass(wide, table, positions, six),
            PackedPass(torch.zeros(1, 6, dtype=torch.int64)),
        ):
            found = target.paged(ids[None], positions[None], context)
            torch.testing.assert_close(found.final, expected.final, atol=1e-5, rtol=1e-5)
        for count in (MOST_ROWS, MOST_ROWS + 1):  # texts of one token
            first, tables = torch.zeros(count, dtype=torch.int64), torch.arange(count)[:, None]
            context = PagedPass(target.new_pool(count, 4), tables, first, first + 1)
            target.paged(first[None] + 5, first[None], context)
    assert taken == [True, True, False, False, False, True, False]


def test_rows_with_more_queries_than_share_a_key_are_replayed(llama, monkeypatch):
    target = llama
    monkeypatch.setattr(paged_compiled, "MOST_QUERIES", 16)
    longest = 16 // body(target)._one_call.most_group
    with counted(target, monkeypatch) as taken:
        read_two(target, [(longest, 1), (longest + 1, 1)])
    assert taken == [True, False]


def test_weights_written_in_place_count_after_a_refresh(written):
    target = written
    (before, *_) = read_two(target, [(3, 0)]).everything
    with torch.no_grad():
        for weight in target.model.model.layers.parameters():
            weight.mul_(1.5)
    target.refresh()
    (found, *_) = read_two(target, [(3, 0)]).everything
    with one_by_one(target):
        (expected, *_) = read_two(target, [(3, 0)]).everything
    assert torch.equal(found, expected) and not torch.equal(found, before)


@torch.no_grad()
def test_a_token_behind_its_blocks_is_an_error(llama):
    target = llama
    positions = torch.tensor([4])
    context = PagedPass(
        target.new_pool(4, 4), torch.ones(1, 1).long(), positions, torch.ones(1).long()
    )
    with pytest.raises(IndexError, match="behind the blocks"):
        target.paged(positions[None], positions[None], context)


@torch.no_grad()
def test_angles_are_made_as_far_as_positions_go(llama):
    """Behind the first tables, whatever the ids; an id outside the vocabulary is an error."""
    target = llama
    tables, last = body(target)._one_call._tables, target.vocab_size - 1
    first = len(tables.tables[0])
    pool, table, one = target.new_pool(first, 4), torch.arange(first)[None], torch.tensor([1])
    for position, rows in ((first - 1, first), (first, 2 * first), (first + 44, 2 * first)):
        found = [
            target.paged(torch.tensor([[last]]), torch.tensor([[position]]), context).final
            for context in (
                PagedPass(pool, table, torch.tensor([position]), one),
                PagedPass(pool, table, torch.tensor([position]), one, impl="torch"),
            )
        ]
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
        assert len(tables.tables[0]) == rows
    with pytest.raises(IndexError, match="outside the vocabulary"):
        strange, position = torch.tensor([[last + 1]]), torch.tensor([3])
        target.paged(strange, position[None], PagedPass(pool, table, position, one))
    assert len(tables.tables[0]) == 2 * first


@torch.no_grad()
def test_what_a_call_reads_lives_until_it_ends(written):
    """Another thread makes tables longer and lays weights out again meanwhile."""
    target = written
    one, position = body(target)._one_call, torch.tensor([5])

    def final() -> torch.Tensor:
        context = PagedPass(target.new_pool(4, 4), torch.arange(4)[None], position, position // 5)
        return target.paged(position[None], position[None], context).final

    expected = final()
    run = one.calls._function
    products = [held for held in one.calls.held if isinstance(held, FewRows)]
    read = [weakref.ref(held) for held in (*products, *one._tables.tables)]
    assert len(products) == 4 * target.num_layers
    del products

    def meanwhile(*arguments):
        for weight in target.model.model.layers.parameters():
            if weight.ndim == 2:
                weight.mul_(1.5)
        target.refresh()
        one.reach(len(one._tables.tables[0]))
        assert None not in [held() for held in read]
        return run(*arguments)

    one.calls._function = meanwhile
    assert torch.equal(final(), expected)
    assert [held() for held in read] == [None] * len(read)
    assert not torch.equal(final(), expected)


@torch.no_grad()
def test_tables_that_another_thread_has_made_longer_are_taken(llama):
    target, one = llama, body(llama)._one_call
    first, run = len(one._tables.tables[0]), one.calls._function
    position = torch.tensor([first + 44])

    def late(*arguments):
        outcome = run(*arguments)
        one.reach(first + 44)
        return outcome

    pool, table = target.new_pool(first, 4), torch.arange(first)[None]
    context = PagedPass(pool, table, position, torch.tensor([1]))
    one.calls._function = late
    found = target.paged(torch.tensor([[5]]), position[None], context).final
    assert len(one._tables.tables[0]) == 2 * first and run is one.calls._function
    again = target.paged(torch.tensor([[5]]), position[None], context).final
    assert torch.equal(found, again)


def test_without_a_compiler_forwards_are_replayed(tiny_target, monkeypatch):
    monkeypatch.setattr(kernel_steps, "row_steps", lambda dtype: None)
    assert body(made(tiny_target, "llama"))._one_call is None
