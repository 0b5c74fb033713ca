"""Captured passes: the right shape for a round, padding that nobody sees, fixed addresses, one
capture a shape."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool, TreeLayout
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.cuda_graphs import CudaCapturer, row_buckets
from draftsmith.serve.engine.graphs import (
    PassGraphs,
    PassInputs,
    can_capture,
    padding_lengths,
    token_buckets,
)
from draftsmith.serve.parallel import LeadingTarget

BLOCK, MAX_BLOCKS, MAX_BATCH = 4, 8, 5


class ReplayingGraph:
    """As a CUDA graph does: reads and writes the tensors it was captured with, whatever they hold
    by then."""

    def __init__(self, run: Callable[[], TargetOutput], output: TargetOutput):
        self.run, self.output = run, output

    def replay(self) -> None:
        again = self.run()
        self.output.logits.copy_(again.logits)
        if self.output.taps is not None:
            self.output.taps.copy_(again.taps)


class FakeCapturer:
    def __init__(self) -> None:
        self.captures = 0

    def capture(self, run: Callable[[], TargetOutput]) -> tuple[ReplayingGraph, TargetOutput]:
        self.captures += 1
        output = run()
        return ReplayingGraph(run, output), output


def make_graphs(target: Target, capturer: object) -> PassGraphs:
    pool = target.new_pool(40, BLOCK)
    return PassGraphs(target, pool, max_batch=MAX_BATCH, max_blocks=MAX_BLOCKS, capturer=capturer)


def tables_of(num_rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    # never the null block
    order = torch.randperm(39, generator=torch.Generator().manual_seed(1)) + 1
    return order[: num_rows * 6].view(num_rows, 6).to(device)


def round_of(
    lengths: list[int], begins: list[int], seed: int, device: torch.device | str = "cpu"
) -> PassInputs:
    """Row b's tokens at `begins[b]` and on, logits wanted of all but its first token where it has
    several."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 200, (sum(lengths),), generator=generator).tolist()
    positions, wanted, at = [], [], 0
    for length, begin in zip(lengths, begins):
        positions += range(begin, begin + length)
        wanted += range(at + min(1, length - 1), at + length)
        at += length
    return PassInputs(ids, positions, lengths, wanted, tables_of(len(lengths), device), None)


def with_tree(inputs: PassInputs) -> PassInputs:
    """The first row's tokens after its first become siblings under it; the other rows
    stay chains."""
    device, count, root = inputs.tables.device, inputs.lengths[0], inputs.positions[0]
    positions = [root] + [root + 1] * (count - 1) + inputs.positions[count:]
    ancestors = [-1] + [1 | 1 << node for node in range(1, count)] + [-1] * (len(positions) - count)
    columns = (inputs.positions, ancestors, [root] * len(positions))
    return inputs._replace(
        positions=positions,
        tree=TreeLayout(*(torch.tensor(column, device=device) for column in columns)),
    )


def eager(
    target: Target, pool: PagedPool, inputs: PassInputs, taps: tuple[int, ...]
) -> TargetOutput:
    device = target.device
    positions = torch.tensor(inputs.positions, device=device)
    context = PagedPass(
        pool,
        inputs.tables,
        positions,
        torch.tensor(inputs.lengths, device=device),
        tree=inputs.tree,
    )
    wanted = torch.tensor(inputs.logit_rows, device=device)
    return target.forward(
        torch.tensor([inputs.ids], device=device), positions[None], context, wanted, taps
    )


ROUNDS = [
    ([3, 3, 3], [0, 0, 0]),
    ([1, 1, 1], [3, 3, 3]),
    ([4, 1, 2], [4, 4, 4]),
    ([1, 1, 1], [8, 5, 6]),
    ([5, 3, 6], [9, 6, 7]),
]


def assert_rounds_equal(target: Target, capturer: object, device: torch.device | str) -> None:
    graphs, own = make_graphs(target, capturer), target.new_pool(40, BLOCK)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed, (lengths, begins) in enumerate(ROUNDS * 2):
        inputs = round_of(lengths, begins, seed, device)
        if seed % 2:
            inputs = with_tree(inputs)
        taps = (0, 3) if seed % 3 else ()
        found, expected = graphs.run(inputs, taps), eager(target, own, inputs, taps)
        assert found is not None
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
        if taps:
            kept.append((found.taps, expected.taps))
    # Requests keep taps for rounds: later replays must not write into them.
    for found_taps, expected_taps in kept:
        torch.testing.assert_close(found_taps, expected_taps, atol=1e-4, rtol=1e-4)
    for one, other in zip((*graphs.pool.keys, *graphs.pool.values), (*own.keys, *own.values)):
        # All but the null block, which padding writes.
        torch.testing.assert_close(one[BLOCK:], other[BLOCK:], atol=1e-4, rtol=1e-4)


def test_replayed_rounds_are_the_eager_ones(target):
    assert_rounds_equal(target, FakeCapturer(), "cpu")


@pytest.mark.gpu
def test_cuda_graphs_are_the_eager_passes(tiny_target):
    target = Target.load(tiny_target("llama"), device="cuda")
    with torch.inference_mode():
        assert_rounds_equal(target, CudaCapturer(), "cuda")


def test_a_shape_is_captured_once_and_its_inputs_stay_where_they_are(target):
    capturer = FakeCapturer()
    graphs = make_graphs(target, capturer)
    places = set()
    for seed in range(6):
        graphs.run(round_of([2, 1, 2], [seed, seed, seed], seed), ())
        (static, _, output) = next(iter(graphs._graphs.values()))
        places.add(
            (
                static.ids.data_ptr(),
                static.tables.data_ptr(),
                static.lengths.data_ptr(),
                output.logits.data_ptr(),
            )
        )
    assert (capturer.captures, graphs.num_graphs, len(places)) == (1, 1, 1)


def test_few_shapes_serve_every_round(target):
    capturer = FakeCapturer()
    graphs = make_graphs(target, capturer)
    rounds = 0
    for num_rows in range(1, MAX_BATCH + 1):
        for longest in range(1, 7):
            lengths = [1 + row % longest for row in range(num_rows)]
            assert graphs.run(round_of(lengths, [0] * num_rows, 0), ()) is not None
            rounds += 1
    assert capturer.captures < rounds
    assert capturer.captures <= len(graphs.rows) * len(graphs.tokens)


def test_a_pass_without_padding_gets_exactly_its_shape(target):
    graphs = make_graphs(target, FakeCapturer())
    assert graphs.shape_for(round_of([1], [0], 0), ())[:2] == (1, 1)
    assert graphs.shape_for(round_of([3, 3], [0, 0], 0), ())[:2] == (2, 6)


def test_a_pass_too_large_for_every_graph_is_left_alone(target):
    graphs = make_graphs(target, FakeCapturer())
    graphs.tokens = token_buckets(8)
    assert graphs.run(round_of([9], [0], 0), ()) is None
    assert graphs.run(round_of([2, 2, 2], [0, 0, 0], 0), ()) is not None


def test_padding_stays_in_the_null_block(target):
    graphs = make_graphs(target, FakeCapturer())
    inputs = round_of([2, 2, 2, 3], [0] * 4, 0)
    shape = graphs.shape_for(inputs, ())
    assert shape.num_tokens > 9
    graphs.run(inputs, ())
    own = set(inputs.tables.flatten().tolist())
    written = (
        graphs.pool.keys[0].view(40, BLOCK, -1).abs().sum(dim=(1, 2)).nonzero().flatten().tolist()
    )
    assert set(written) <= own | {NULL_BLOCK}
    static = graphs._graphs[shape][0]
    assert static.tables[4:].eq(NULL_BLOCK).all()
    assert int(static.lengths.sum()) == shape.num_tokens


def test_a_model_that_cannot_be_captured_is_served_without_graphs(target, caplog):
    class Failing:
        def capture(self, run):
            raise RuntimeError("operation not permitted when stream is capturing")

    graphs = make_graphs(target, Failing())
    for _ in range(2):
        assert graphs.run(round_of([1, 1], [0, 0], 0), ()) is None
    assert caplog.text.count("cannot be captured") == 1


def test_buckets():
    assert row_buckets(8) == [1, 2, 3, 4, 6, 8, 9]
    assert row_buckets(5) == [1, 2, 3, 4, 5, 6]
    assert token_buckets(32) == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32]
    assert padding_lengths(3, 7) == [1, 1, 5]
    assert padding_lengths(0, 0) == []


def test_a_sharded_target_is_not_captured():
    """Its passes are told to other processes, and a graph tells nobody."""

    def on(kind: type, place: str) -> Target:
        return Mock(spec=kind, device=torch.device(place))

    assert can_capture(on(Target, "cuda"))
    assert not can_capture(on(LeadingTarget, "cuda")) and not can_capture(on(Target, "cpu"))
