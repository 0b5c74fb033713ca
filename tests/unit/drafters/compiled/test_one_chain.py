"""Chains drafted by one call: the bits of the same kernels called token by token, in the pool too,
and every other round left to them."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.drafters.compiled import one_chain
from draftsmith.drafters.compiled.captured import capture_forwards
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import (
    OPTIONS,
    DraftLmOptions,
    Eagle1Options,
    Eagle3Options,
    MtpOptions,
)
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.kernels.forward.row_steps import row_steps
from draftsmith.kernels.products.few_rows import MOST_ROWS
from draftsmith.kernels.sampling.draw_compiled import ARGUMENTS
from draftsmith.kernels.sampling.filters import SamplingRows

Draw = ctypes.CFUNCTYPE(ctypes.c_bool, *ARGUMENTS)  # of a chain's kernel

pytestmark = pytest.mark.skipif(row_steps(torch.float32) is None, reason="there is no C++ compiler")
KINDS = {
    "eagle3": ("eagle3", Eagle3Options()),
    "eagle3 subset": ("eagle3", Eagle3Options(draft_vocab_size=120)),
    "eagle3 norms": ("eagle3", Eagle3Options(norm_output=True, window=5)),
    "eagle1": ("eagle1", Eagle1Options()),
    "mtp": ("mtp", MtpOptions()),
    "draft-lm": ("draft-lm", DraftLmOptions(num_layers=2, hidden_size=32, num_attention_heads=2)),
}
SAMPLED = {"temperature": 0.7, "top_k": 40, "top_p": 0.9}
# (position of the first unread token, unread tokens, most drafts) of each row
PLAIN = [(0, 7, 3), (5, 2, 3), (9, 4, 3)]
RAGGED = [(0, 8, 1), (3, 1, 4), (6, 2, 0), (1, 5, 4), (2, 1, 0), (4, 3, 2)]
MANY = [(row, 8, 3) for row in range(MOST_ROWS // 6)]  # more tokens than a pass has
LONG = [(250, 4, 6), (700, 2, 3)]  # behind the first table of angles


@pytest.fixture(scope="module")
def target_of(tiny_target: Callable[..., str]) -> Callable[[torch.dtype], Target]:
    return functools.cache(lambda dtype: Target.load(tiny_target("llama"), dtype=dtype))


@pytest.fixture(scope="module")
def float32(target_of: Callable[[torch.dtype], Target]) -> Target:
    return target_of(torch.float32)


@pytest.fixture(scope="module")
def drafter_of(target_of: Callable[[torch.dtype], Target]) -> Callable[..., Any]:
    """For tests that leave it as it is."""
    return functools.cache(lambda kind, dtype=torch.float32: made(kind, target_of(dtype)))


def made(kind: str, target: Target):
    family, options = KINDS[kind]
    counts = torch.randint(
        1, 1000, (target.vocab_size,), generator=torch.Generator().manual_seed(1)
    )
    found = FAMILIES[family].create(options, target, seed=0, token_counts=counts)
    found = found.to(dtype=target.dtype).eval()
    capture_forwards(target, found)
    assert found.one_chain is not None
    return found


def round_of(
    drafter, target: Target, rows: Sequence[tuple[int, int, int]], temperature: float, **filters
) -> DraftInputs:
    """Noise in an empty pool."""
    generator = torch.Generator().manual_seed(len(rows))
    starts, lengths, budgets = map(list, zip(*rows))
    tokens = torch.randint(3, target.vocab_size, (sum(lengths),), generator=generator)
    size = (sum(lengths) - len(rows), len(drafter.taps) * target.hidden_size)
    taps = torch.randn(size, generator=generator).to(target.dtype) if drafter.taps else None
    options = {name: [value] * len(rows) for name, value in filters.items()}
    # One row is greedy, unless all are.
    temperatures = [temperature] * (len(rows) - 1) + [0.0]
    return DraftInputs(
        tokens=tokens,
        starts=torch.tensor(starts),
        lengths=torch.tensor(lengths),
        taps=taps,
        num_draft=torch.tensor(budgets),
        sampling=SamplingRows.of(temperatures, **options),
        seeds=torch.arange(len(rows)) * 77 - 5,
        pool=drafter.new_pool(len(rows) * 180, 4, target.device, target.dtype),
        block_tables=torch.randperm(len(rows) * 180, generator=generator).view(len(rows), 180),
        histories=[[0]] * len(rows),
    )


def drafts(drafter, inputs: DraftInputs, *, at_once: bool) -> tuple[Proposal, DraftInputs]:
    """The proposal, and the inputs with the pool that it left."""
    pool = replace(inputs.own_pool, keys=[], values=[])
    for name in ("keys", "values"):
        getattr(pool, name).extend(one.clone() for one in getattr(inputs.own_pool, name))
    inputs = replace(inputs, pool=pool)
    chain = drafter.one_chain
    drafter.one_chain = chain if at_once else None
    try:
        with torch.inference_mode():
            return drafter.propose(inputs), inputs
    finally:
        drafter.one_chain = chain


def assert_same(
    found: tuple[Proposal, DraftInputs], expected: tuple[Proposal, DraftInputs]
) -> None:
    (one, mine), (other, others) = found, expected
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.lengths, other.lengths)
    assert (one.logits is None) == (other.logits is None)
    if one.logits is not None and other.logits is not None:
        assert torch.equal(one.logits, other.logits)
    pairs = zip(
        (*mine.own_pool.keys, *mine.own_pool.values),
        (*others.own_pool.keys, *others.own_pool.values),
    )
    assert all(torch.equal(mine_of, theirs) for mine_of, theirs in pairs)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each round was one call."""
    found: list[bool] = []
    original = one_chain.OneChain.draft

    def draft(*arguments) -> bool:
        found.append(original(*arguments))
        return found[-1]

    monkeypatch.setattr(one_chain.OneChain, "draft", draft)
    return found


FLAT, GREEDY = {"temperature": 1.0}, {"temperature": 0.0}
FULL, HALF = torch.float32, torch.bfloat16
CASES = {
    "eagle3": ("eagle3", FULL, FLAT, PLAIN),
    "eagle3 bfloat16": ("eagle3", HALF, SAMPLED, RAGGED),
    "eagle3 subset": ("eagle3 subset", FULL, GREEDY, RAGGED),
    "eagle3 norms": ("eagle3 norms", FULL, SAMPLED, LONG),
    "eagle1": ("eagle1", FULL, GREEDY, MANY),
    "mtp": ("mtp", FULL, SAMPLED, RAGGED),
    "draft-lm": ("draft-lm", FULL, FLAT, PLAIN),
    "draft-lm long": ("draft-lm", FULL, SAMPLED, LONG),
    "draft-lm bfloat16": ("draft-lm", HALF, GREEDY, RAGGED),
}


@pytest.mark.parametrize(("kind", "dtype", "options", "rows"), CASES.values(), ids=CASES)
def test_one_call_gives_the_bits_of_many(
    kind, dtype, options, rows, target_of, drafter_of, taken
) -> None:
    drafter = drafter_of(kind, dtype)
    inputs = round_of(drafter, target_of(dtype), rows, **options)
    found = drafts(drafter, inputs, at_once=True)
    assert taken == [True]
    assert_same(found, drafts(drafter, inputs, at_once=False))
    lengths = [0 if length < drafter.ahead else budget for _, length, budget in rows]
    assert found[0].lengths.tolist() == lengths
    if found[0].has_mass is not None:
        offered = torch.arange(found[0].tokens.shape[1]) < found[0].lengths[:, None]
        assert found[0].has_mass[offered].all()


@pytest.mark.parametrize("undecided", [0, 2])
def test_draws_that_are_torch_s_go_on_from_there(float32, drafter_of, undecided, taken) -> None:
    """The chain's own draw refuses at one depth."""
    drafter = drafter_of("eagle3")
    inputs = round_of(drafter, float32, RAGGED, temperature=1.0)
    chain, calls = drafter.one_chain, []
    real = ctypes.cast(chain._chain.draw, Draw)

    def draw(*arguments) -> bool:
        calls.append(arguments)
        return len(calls) != undecided + 1 and real(*arguments)

    refusing = Draw(draw)
    before, chain._chain.draw = chain._chain.draw, ctypes.cast(refusing, ctypes.c_void_p).value
    try:
        found = drafts(drafter, inputs, at_once=True)
    finally:
        chain._chain.draw = before
    assert taken == [True] and len(calls) == undecided + 1
    assert_same(found, drafts(drafter, inputs, at_once=False))


def test_tables_that_a_chain_reads_live_until_it_ends(float32: Target) -> None:
    """Another thread makes them longer between two depths."""
    drafter = made("draft-lm", float32)
    chain, inputs = drafter.one_chain, round_of(drafter, float32, PLAIN, temperature=1.0)
    expected = drafts(drafter, inputs, at_once=True)
    real, alive = ctypes.cast(chain._chain.draw, Draw), []
    read = [weakref.ref(table) for table in chain._step._tables.tables]

    def draw(*arguments) -> bool:
        chain._step.reach(1000)
        alive.extend(table() is not None for table in read)
        return real(*arguments)

    longer = Draw(draw)
    before, chain._chain.draw = chain._chain.draw, ctypes.cast(longer, ctypes.c_void_p).value
    try:
        found = drafts(drafter, inputs, at_once=True)
    finally:
        chain._chain.draw = before
    assert alive == [True] * 3 * len(read)
    assert_same(found, expected)
    drafts(drafter, inputs, at_once=True)
    assert [table() for table in read] == [None] * len(read)


def test_memory_is_taken_by_the_first_round(float32: Target) -> None:
    drafter = made("eagle3", float32)
    assert not drafter.one_chain._memory
    counted = drafter.buffer_bytes
    drafts(drafter, round_of(drafter, float32, PLAIN, temperature=0.0), at_once=True)
    taken = {id(one): one.untyped_storage() for one in drafter.one_chain._memory.values()}
    assert taken and counted == sum(storage.nbytes() for storage in taken.values())


def test_drafts_that_take_turns_share_memory(float32: Target) -> None:
    first, sharing, alone = (made("eagle3", float32) for _ in range(3))
    with torch.no_grad():
        for parameter in (*sharing.parameters(), *alone.parameters()):
            parameter.mul_(1.5)
    given = round_of(first, float32, RAGGED, **SAMPLED)
    expected = [drafts(one, given, at_once=True) for one in (first, alone, first, alone)]
    assert not torch.equal(expected[0][0].logits, expected[1][0].logits)
    assert TextFirst(sharing, Suffix()).share_buffers(TextFirst(first, Suffix()))
    for drafter, one in zip((first, sharing, first, sharing), expected, strict=True):
        assert_same(drafts(drafter, given, at_once=True), one)
    assert sharing.one_chain._memory is first.one_chain._memory
    assert not made("eagle1", float32).share_buffers(first)


def test_drafts_that_could_not_use_it_have_no_chain(
    float32: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = (
        FAMILIES["p-eagle"].create(OPTIONS["p-eagle"](), float32, seed=0).to(dtype=float32.dtype)
    )
    other.eval().capture_forward()
    assert other._captured is not None and other.one_chain is None
    monkeypatch.setattr(one_chain, "MOST_QUERIES", 0)
    with pytest.raises(AssertionError):
        made("eagle3", float32)


def test_several_threads_draft_the_same(float32: Target, drafter_of) -> None:
    drafter, threads = drafter_of("eagle3"), torch.get_num_threads()
    inputs = round_of(drafter, float32, RAGGED, temperature=1.0)
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(drafts(drafter, inputs, at_once=True))
    finally:
        torch.set_num_threads(threads)
    assert_same(*found)


def test_rounds_that_the_kernels_do_not_take_are_drafted_token_by_token(
    float32: Target, drafter_of, taken
) -> None:
    drafter = drafter_of("eagle3")
    chain = drafter.one_chain
    inputs = round_of(drafter, float32, PLAIN, temperature=0.0)
    many = [(0, 2, 1)] * (MOST_ROWS + 1)
    for other in (
        replace(inputs, adjust=lambda logits, rows, prefixes: logits),
        replace(inputs, least_confidence=0.01),
        round_of(drafter, float32, [(0, 60, 2)], temperature=0.0),
        round_of(drafter, float32, many, temperature=0.0),
    ):
        drafts(drafter, other, at_once=True)
    with chain._lock:  # another thread drafts
        drafts(drafter, inputs, at_once=True)
    assert taken == [False] * 5
    drafts(drafter, inputs, at_once=True)
    assert taken[-1]


def test_a_draft_without_numbers_has_no_mass(float32: Target) -> None:
    drafter = made("eagle3", float32)
    with torch.no_grad():
        drafter.lm_head.weight.fill_(torch.nan)
    for temperature in (0.0, 1.0):
        inputs = round_of(drafter, float32, PLAIN, temperature=temperature)
        (found, _), (expected, _) = (
            drafts(drafter, inputs, at_once=at_once) for at_once in (True, False)
        )
        assert torch.equal(found.tokens, expected.tokens)
        assert (found.has_mass is None) == (temperature == 1)  # told by its logits then
        if found.has_mass is not None:
            assert not found.has_mass.any()


def test_a_token_outside_the_vocabulary_or_its_blocks_is_an_error(
    float32: Target, drafter_of
) -> None:
    drafter = drafter_of("draft-lm")
    inputs = round_of(drafter, float32, PLAIN, temperature=0.0)
    strange = inputs.tokens.clone()
    strange[2] = float32.vocab_size
    with pytest.raises(LookupError, match="no row"):
        drafts(drafter, replace(inputs, tokens=strange), at_once=True)
    with pytest.raises(IndexError, match="behind the blocks"):
        few = inputs.block_tables[:, :1].contiguous()
        drafts(drafter, replace(inputs, block_tables=few), at_once=True)
    near = round_of(drafter, float32, LONG[:1], temperature=0.0)
    with pytest.raises(IndexError, match="behind the blocks"):
        drafts(drafter, replace(near, block_tables=few[:1]), at_once=True)
    assert len(drafter.one_chain._step._tables.tables[0]) == 256  # which were long enough
