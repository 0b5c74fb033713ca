"""Drafting on an accelerator: nothing is read back on the way, and captured steps draft what steps
that are not captured do.

The meta device stands for one: its tensors have no values to be read, so whatever looks at one
raises.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from draftsmith.drafters.autoregressive.draft_sampler import DraftStep
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import DynamicTree, SampledShape, SampledTree, TreeShape
from draftsmith.kernels.attention import paged as paged_attention
from draftsmith.kernels.attention.paged_torch import reference_attention
from draftsmith.kernels.attention.pool import PagedPool, PassLayout, Scoring, slots_of
from draftsmith.kernels.cuda_graphs import CountedCapturer, CudaCapturer, GraphRoom
from draftsmith.kernels.sampling.filters import SamplingRows
from tests.device_traffic import ReplayingGraph, StandInCapturer, Traffic
from tests.small_drafts import small_draft

BLOCK, MAX_BLOCKS, MAX_BATCH = 4, 12, 5
CHAINS = ("eagle3 subset", "eagle1", "mtp", "draft-lm")
KINDS = (*CHAINS, "p-eagle", "medusa", "mlp", "dflash", "dflash, seeing all", "dspark")
AGAIN = ("eagle1", "mtp", "dflash, seeing all")
TREES = ("eagle3 subset", "eagle1", "mtp")
SAMPLED = {
    "temperature": (0.7, 1.0, 1.4),
    "top_k": (0, 20, 5),
    "top_p": (1.0, 0.9, 0.8),
    "min_p": (0.0, 0.02, 0.0),
}
GREEDY = {"temperature": (0.0, 0.0, 0.0)}
GREEDY_5 = {"temperature": (0.0,) * 5}
MIXED = SAMPLED | {"temperature": (0.7, 0.0, 1.4)}


class BlindContext:
    """Paged attention by one gather of all places that a row's table has: every size comes from
    shapes."""

    def __init__(self, block_size: int, layout: PassLayout):
        tables, positions, lengths, tree = layout
        rows = torch.repeat_interleave(lengths, output_size=len(positions))
        inner, places = (
            torch.arange(size, device=tables.device)
            for size in (block_size, tables.shape[1] * block_size)
        )
        self.places = (tables[:, :, None] * block_size + inner).flatten(1)[rows]  # [T, n]
        seen = places <= (positions if tree is None else tree.kv_indices)[:, None]
        if tree is not None:
            index = places - tree.first[:, None]
            bits = (tree.ancestors[:, None] >> index.clamp(0, 62)) & 1 == 1
            seen = torch.where(
                (tree.ancestors == -1)[:, None], seen, (index < 0) | (bits & (index < 63))
            )
        self.seen = seen  # [T, n]
        self.slots = slots_of(block_size, tables, rows, layout.kv_indices)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        # What nobody sees is not loaded by a kernel either: 0 * NaN would be NaN.
        seen = self.seen[:, None, :, None]
        k, v = (
            torch.where(seen, part[self.places].transpose(1, 2).to(query.dtype), 0.0)
            for part in (keys, values)
        )
        q = query[0].transpose(0, 1)[:, :, None]
        return reference_attention(q, k, v, self.seen[:, None, None], rule)[:, :, 0]


def to_meta(drafter: Any, target: Target) -> Any:
    target.model.to("meta")
    return drafter.to("meta")


def inputs_for(
    drafter: Any,
    target: Target,
    starts: Sequence[int],
    num_draft: Sequence[int],
    distribution: dict[str, Sequence[float]],
    pool: PagedPool | None,
    seed: int = 0,
) -> DraftInputs:
    """Row b has `starts[b]` cached positions and three more tokens."""
    device, size = target.device, len(starts)
    generator = torch.Generator().manual_seed(seed)
    order = 1 + torch.randperm(MAX_BATCH * MAX_BLOCKS, generator=torch.Generator().manual_seed(1))
    taps = torch.randn(2 * size, len(drafter.taps) * target.hidden_size, generator=generator)
    return DraftInputs(
        tokens=torch.randint(3, target.vocab_size, (3 * size,), generator=generator).to(device),
        starts=torch.tensor(starts),
        lengths=torch.tensor([3] * size),
        taps=taps.to(device) if drafter.taps else None,
        num_draft=torch.tensor(num_draft),
        sampling=SamplingRows.of(
            **{name: values[:size] for name, values in distribution.items()}, device=device
        ),
        seeds=torch.arange(size, device=device) + 10 * seed,
        pool=pool,
        block_tables=order.view(MAX_BATCH, MAX_BLOCKS)[:size, : MAX_BLOCKS - 2].to(device),
        histories=[[]] * size,
    )


def room_of(pool: PagedPool | None, capturer: Any) -> GraphRoom:
    return GraphRoom(pool, MAX_BATCH, MAX_BLOCKS, capturer)


def new_pool(drafter: Any, target: Target) -> PagedPool | None:
    return drafter.new_pool(MAX_BATCH * MAX_BLOCKS + 1, BLOCK, target.device, torch.float32)


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        paged_attention, "attention_context", lambda keys, *given, impl: BlindContext(*given)
    )


# Each kind with one distribution and each distribution with several kinds.
PAIRS = list(zip(KINDS, itertools.cycle([MIXED, GREEDY, SAMPLED])))
# Other chains and blocks run the same code between the passes of their own module.
CALLS = [
    pytest.param(kind, distribution, id=kind, marks=[pytest.mark.long] * (kind in AGAIN))
    for kind, distribution in PAIRS
]
BRANCHED = (DynamicTree(nodes=12, depth=4, width=3), SampledTree(branches=(3, 2, 1)))


@pytest.mark.parametrize("kind, distribution", CALLS)
def test_a_call_takes_one_message_from_the_host_at_any_k(
    kind: str, tiny_target: Callable[..., str], distribution: dict, blind: None
) -> None:
    target = Target.load(tiny_target("llama"), dtype=torch.float32)
    drafter = to_meta(small_draft(kind, target), target)
    pool = new_pool(drafter, target)

    def counted(num_draft: Sequence[int], kept: dict[str, Sequence[float]]) -> Traffic:
        inputs = inputs_for(drafter, target, (3, 0, 5), num_draft, kept, pool)
        with torch.no_grad(), Traffic().counted() as traffic:
            proposal = drafter.propose(inputs)
        assert len(traffic.uploads) <= 1 and not traffic.looks
        assert proposal.tokens.shape == (3, max(num_draft))
        assert proposal.tokens.device.type == "meta"
        return traffic

    ragged = ((4, 0, 3), (0, 0, 0))
    for num_draft in ragged:
        counted(num_draft, distribution)
    drafter.capture(room_of(pool, StandInCapturer()))
    for num_draft in ragged:
        counted(num_draft, distribution)
    if kind in CHAINS:
        # The first one makes the buffers, the second one captures.
        rounds = [counted((k,) * 3, GREEDY) for k in (2, 2, 1, 2, 5)]
        counts = [traffic.num_operations for traffic in rounds]
        # One for the catch-up and the first draw and one a step; the rest moves inputs and results.
        assert [traffic.operations["replay"] for traffic in rounds[2:]] == [1, 2, 5]
        assert counts[2] <= 21 and counts[4] - counts[3] == 3 * (counts[3] - counts[2]) <= 3 * 3
    else:
        rounds = [counted((k,) * 3, distribution) for k in (2, 2, 4, 4)]
        counts = [traffic.num_operations for traffic in rounds]
        assert [traffic.operations["replay"] for traffic in rounds] == [1] * 4
        assert counts[1] <= 21 and counts[3] - counts[1] <= 2 * 2


@pytest.mark.parametrize(
    "kind", [TREES[0], *(pytest.param(kind, marks=pytest.mark.long) for kind in TREES[1:])]
)
def test_a_tree_takes_one_message_from_the_host(
    kind: str, tiny_target: Callable[..., str], blind: None
) -> None:
    target = Target.load(tiny_target("llama"), dtype=torch.float32)
    drafter = to_meta(small_draft(kind, target), target)
    pool = new_pool(drafter, target)
    drafter.capture(room_of(new_pool(drafter, target), StandInCapturer()))
    rounds = ((GREEDY, pool), (SAMPLED, pool), (SAMPLED, drafter.level_graphs.pool))
    for shape, (distribution, used) in itertools.product((*BRANCHED, SampledShape()), rounds):
        inputs = inputs_for(drafter, target, (3, 0, 5), (5, 0, 12), distribution, used)
        with torch.no_grad(), Traffic().counted() as traffic:
            proposal = drafter.propose_tree(inputs, shape)
        assert len(traffic.uploads) == 1 and not traffic.looks
        assert proposal.parents is not None and proposal.tokens.device.type == "meta"


def test_a_look_would_be_noticed(tiny_target: Callable[..., str]) -> None:
    """Attention on a CPU asks for lengths and places."""
    target = Target.load(tiny_target("llama"), dtype=torch.float32)
    drafter = to_meta(small_draft("eagle3 subset", target), target)
    inputs = inputs_for(drafter, target, (3, 0, 5), (2, 2, 2), GREEDY, new_pool(drafter, target))
    with (
        torch.inference_mode(),
        pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"),
    ):
        drafter.propose(inputs)


ROUNDS = [
    ((3, 0, 5), (3, 3, 3)),
    ((5, 2, 7), (4, 1, 3)),
    ((8,), (5,)),
    ((8, 4, 9), (0, 2, 6)),
    ((9, 6), (2, 1)),
]


def assert_equal(found: Proposal, expected: Proposal) -> None:
    assert torch.equal(found.lengths, expected.lengths)
    real = torch.arange(found.tokens.shape[1], device=found.tokens.device) < found.lengths[:, None]
    assert torch.equal(found.tokens[real], expected.tokens[real])
    if expected.logits is None:
        assert found.logits is None and torch.equal(found.has_mass, expected.has_mass)
    else:
        torch.testing.assert_close(
            found.logits[real].softmax(-1), expected.logits[real].softmax(-1), atol=1e-4, rtol=1e-4
        )


def assert_captured_rounds_are_the_plain_ones(
    kind: str, target: Target, capturer: Any, distribution: dict
) -> None:
    """Rounds of other rows, k and, half way, other weights. A drafter that was not captured makes
    the plain ones."""
    drafter, eager = small_draft(kind, target), small_draft(kind, target)
    plain, captured = new_pool(eager, target), new_pool(drafter, target)
    drafter.capture(room_of(captured, capturer))
    for seed, (starts, num_draft) in enumerate(ROUNDS * 2):
        if seed == len(ROUNDS):
            for parameter in (*drafter.parameters(), *eager.parameters()):
                parameter.data.mul_(1.1)
        found, expected = (
            one.propose(inputs_for(one, target, starts, num_draft, distribution, pool, seed))
            for one, pool in ((drafter, captured), (eager, plain))
        )
        assert_equal(found, expected)
        if plain is None or captured is None:
            continue
        for one, other in zip((*captured.keys, *captured.values), (*plain.keys, *plain.values)):
            # All but the null block, which rows that are done write.
            torch.testing.assert_close(one[BLOCK:], other[BLOCK:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind, distribution", PAIRS[len(CHAINS) :], ids=KINDS[len(CHAINS) :])
def test_captured_calls_draft_the_same(kind: str, target: Target, distribution: dict) -> None:
    capturer = CountedCapturer(StandInCapturer())
    with torch.inference_mode():
        assert_captured_rounds_are_the_plain_ones(kind, target, capturer, distribution)
    # Five kinds of rounds, of which a drafter of few tokens takes some for one.
    assert 2 <= capturer.num_graphs <= 5 and not capturer.broken


@pytest.mark.parametrize("kind, distribution", PAIRS[: len(CHAINS)], ids=CHAINS)
def test_captured_steps_draft_the_same(kind: str, target: Target, distribution: dict) -> None:
    capturer = CountedCapturer(StandInCapturer())
    with torch.inference_mode():
        assert_captured_rounds_are_the_plain_ones(kind, target, capturer, distribution)
    # Three, two or one rows, of beginnings and of steps; a batch that happens to be all greedy has
    # graphs of its own.
    assert 5 <= capturer.num_graphs <= 8 and not capturer.broken


def assert_captured_trees_are_the_plain_ones(
    kind: str, target: Target, capturer: Any, shape: TreeShape, distribution: dict
) -> None:
    drafter = small_draft(kind, target)
    plain, captured = new_pool(drafter, target), new_pool(drafter, target)
    drafter.capture(room_of(captured, capturer))
    budgets = ((12, 12, 12), (12, 5, 1), (12,), (3, 0, 12))
    for seed, num_draft in enumerate(budgets * 2):
        if seed == len(budgets):
            for parameter in drafter.parameters():
                parameter.data.mul_(1.1)
        starts = (3 + seed, 0, 5)[: len(num_draft)]
        found, expected = (
            drafter.propose_tree(
                inputs_for(drafter, target, starts, num_draft, distribution, pool, seed), shape
            )
            for pool in (captured, plain)
        )
        for one, other in (
            (found.tokens, expected.tokens),
            (found.parents, expected.parents),
            (found.q_rows, expected.q_rows),
        ):
            assert torch.equal(one, other)
        if expected.logits is not None:
            torch.testing.assert_close(
                found.logits.softmax(-1), expected.logits.softmax(-1), atol=1e-4, rtol=1e-4
            )
        assert found.has_mass.all() and expected.has_mass.all()


@pytest.mark.parametrize("shape", BRANCHED)
@pytest.mark.parametrize("kind, distribution", PAIRS[: len(TREES)], ids=TREES)
def test_captured_levels_grow_the_same_trees(
    kind: str, target: Target, shape: TreeShape, distribution: dict
) -> None:
    capturer = CountedCapturer(StandInCapturer())
    with torch.inference_mode():
        assert_captured_trees_are_the_plain_ones(kind, target, capturer, shape, distribution)
    # Three, two or one rows, and levels of two widths.
    assert 0 < capturer.num_graphs <= 6 and not capturer.broken


@pytest.mark.parametrize("kind", ["eagle3 subset", "p-eagle", "dflash"])
def test_broken_taps_leave_the_null_block_alone(kind: str, target: Target) -> None:
    drafter = small_draft(kind, target)
    pool = new_pool(drafter, target)
    drafter.capture(room_of(pool, StandInCapturer()))
    good = drafter.propose(inputs_for(drafter, target, (3, 0, 5), (3, 3, 3), GREEDY, pool))
    inputs = inputs_for(drafter, target, (3, 0, 5), (3, 3, 3), GREEDY, pool)
    inputs.taps[:2] = torch.nan
    broken = drafter.propose(inputs)
    assert good.has_mass.all() and not broken.has_mass[0].any() and broken.has_mass[1:].all()
    drafter.propose(inputs_for(drafter, target, (3, 0), (1, 4), GREEDY, pool))
    inputs = inputs_for(drafter, target, (3, 0, 5, 2), (3, 3, 3, 3), GREEDY_5, pool)
    inputs.taps[:2] = torch.nan
    drafter.propose(inputs)
    inputs = inputs_for(drafter, target, (3, 0, 5, 2, 4), (3,) * 5, GREEDY_5, pool)
    inputs.taps[:2] = torch.nan
    drafter.propose(inputs)
    assert all(torch.isfinite(tensor[:BLOCK]).all() for tensor in (*pool.keys, *pool.values))


def test_a_drafter_that_cannot_be_captured_drafts_without_graphs(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def capture(self, run: Callable[[], DraftStep]) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    drafter = small_draft("eagle3 subset", target)
    pool = new_pool(drafter, target)
    drafter.capture(room_of(pool, Failing()))
    for _ in range(2):
        assert drafter.propose(
            inputs_for(drafter, target, (3, 0), (3, 3), GREEDY, pool)
        ).lengths.tolist() == [3, 3]
    assert caplog.text.count("cannot be captured") == 1


class Full(StandInCapturer):
    """Has no memory for its first capture."""

    def capture(self, run: Callable[[], Any]) -> tuple[ReplayingGraph, Any]:
        if self.captures == 0:
            self.captures += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().capture(run)


def test_a_shape_without_memory_is_left_out(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, capturer = small_draft("eagle3 subset", target), CountedCapturer(Full())
    pool = new_pool(drafter, target)
    drafter.capture(room_of(pool, capturer))
    for starts in ((3, 0), (3, 0), (3, 0, 5), (3, 0, 5)):
        k = [3] * len(starts)
        proposal = drafter.propose(inputs_for(drafter, target, starts, k, GREEDY, pool))
        assert proposal.lengths.tolist() == k
    assert capturer.num_graphs == 2 and not capturer.broken
    assert caplog.text.count("no memory") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind, distribution", PAIRS, ids=KINDS)
def test_cuda_graphs_draft_the_same(
    kind: str, tiny_target: Callable[..., str], distribution: dict
) -> None:
    target = Target.load(tiny_target("llama"), dtype=torch.float32, device="cuda")
    capturer = CountedCapturer(CudaCapturer())
    with torch.inference_mode():
        assert_captured_rounds_are_the_plain_ones(kind, target, capturer, distribution)
    assert capturer.num_graphs > 0 and not capturer.broken


@pytest.mark.gpu
@pytest.mark.parametrize("shape", BRANCHED)
@pytest.mark.parametrize("distribution", [GREEDY, SAMPLED, MIXED])
def test_cuda_graphs_grow_the_same_trees(
    tiny_target: Callable[..., str], shape: TreeShape, distribution: dict
) -> None:
    target = Target.load(tiny_target("llama"), dtype=torch.float32, device="cuda")
    capturer = CountedCapturer(CudaCapturer())
    with torch.inference_mode():
        assert_captured_trees_are_the_plain_ones(TREES[0], target, capturer, shape, distribution)
    assert capturer.num_graphs > 0 and not capturer.broken


@pytest.mark.gpu
@pytest.mark.parametrize("kind, distribution", PAIRS, ids=KINDS)
def test_a_round_waits_as_often_at_any_k(
    kind: str, tiny_target: Callable[..., str], distribution: dict
) -> None:
    target = Target.load(tiny_target("llama"), dtype=torch.float32, device="cuda")
    drafter = small_draft(kind, target)
    pool, waits = new_pool(drafter, target), []
    for k in (2, 2, 4):  # the first one compiles
        inputs = inputs_for(drafter, target, (3, 0, 5), (k, k, k), distribution, pool)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with torch.inference_mode(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                drafter.propose(inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(len(caught))
    assert waits[1] == waits[2] <= 4
