"""Captured passes: few shapes that hold every round, padding that nobody sees, fixed addresses, one
capture a shape, and what a failure ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.drafters.trees.nodes import NodeLayout
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.cuda_graphs import CudaCapturer
from draftsmith.kernels.verify.verdict import DraftTree
from draftsmith.serve.engine.graphs import DraftedIds, PassGraphs, PassInputs
from tests.device_traffic import StandInCapturer
from tests.speculate_trees import TreeSpan, tree_pass

BLOCK, MAX_BLOCKS, MAX_BATCH, PER_ROW, TAPS = 4, 8, 5, 6, (0, 3)


class Keeping(StandInCapturer):
    """Knows the bytes of what captures gave out, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, int] = {}

    def capture(self, run: Callable[[], object]) -> tuple[object, object]:
        graph, output = super().capture(run)
        for tensor in vars(output).values() if output is not None else ():
            self.kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return graph, output


def make_graphs(target: Target, capturer: object, **options: object) -> PassGraphs:
    given = {"max_batch": MAX_BATCH, "per_row": PER_ROW, "taps": TAPS, "has_trees": True} | options
    return PassGraphs(
        target, target.new_pool(40, BLOCK), max_blocks=MAX_BLOCKS, capturer=capturer, **given
    )


def warm_up(graphs: PassGraphs) -> None:
    for shape in graphs.shapes:
        graphs.prepare(shape)


def tables_of(num_rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    # never the null block
    order = torch.randperm(39, generator=torch.Generator().manual_seed(1)) + 1
    return order[: num_rows * 6].view(num_rows, 6).to(device)


def round_of(
    lengths: list[int], begins: list[int], seed: int, device: torch.device | str = "cpu"
) -> PassInputs:
    """Row b's tokens at `begins[b]` and on, logits wanted of all."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 200, (sum(lengths),), generator=generator).tolist()
    positions = [
        position
        for length, begin in zip(lengths, begins)
        for position in range(begin, begin + length)
    ]
    wanted = list(range(len(ids)))
    return PassInputs(ids, positions, lengths, wanted, tables_of(len(lengths), device))


def with_tree(inputs: PassInputs) -> PassInputs:
    """The first row's tokens after its first become siblings under it, whose ids are on the device
    alone; the other rows stay chains."""
    device, size, num_rows = inputs.tables.device, inputs.lengths[0] - 1, len(inputs.lengths)
    held = torch.tensor([size] + [0] * (num_rows - 1), device=device)
    tokens = torch.zeros(num_rows, max(size, 1), dtype=torch.int64, device=device)
    tokens[0, :size] = torch.tensor(inputs.ids[1 : 1 + size], device=device)
    nodes = NodeLayout.of(DraftTree(tokens, torch.full_like(tokens, -1), held))
    ids = [inputs.ids[0], *[0] * size, *inputs.ids[1 + size :]]
    moves = (list(range(size)), list(range(1, 1 + size)))
    return inputs._replace(ids=ids, drafted=DraftedIds(tokens, nodes), moves=moves)


def eager(
    target: Target, pool: PagedPool, inputs: PassInputs, taps: tuple[int, ...]
) -> TargetOutput:
    """Without a graph, trees laid out on the host."""
    device, ids, begins = target.device, list(inputs.ids), inputs.positions
    positions, tree = begins, None
    if inputs.drafted is not None:
        size = inputs.lengths[0] - 1
        ids[1 : 1 + size] = inputs.drafted.tokens[0, :size].tolist()
        spans, at = [TreeSpan(begins[0], 1, [-1] * size)], 1 + size
        for length in inputs.lengths[1:]:
            spans.append(TreeSpan(begins[at], length, []))
            at += length
        positions, tree = tree_pass(spans, device)
    lengths, wanted = (
        torch.tensor(numbers, device=device) for numbers in (inputs.lengths, inputs.logit_rows)
    )
    at = torch.tensor(positions, device=device)
    context = PagedPass(pool, inputs.tables, at, lengths, tree=tree)
    return target.forward(torch.tensor([ids], device=device), at[None], context, wanted, taps)


ROUNDS = [
    ([3, 3, 3], [0, 0, 0]),
    ([1, 1, 1], [3, 3, 3]),
    ([4, 1, 2], [4, 4, 4]),
    ([1, 1, 1], [8, 5, 6]),
    ([5, 3, 6], [9, 6, 7]),
]


def assert_rounds_equal(target: Target, capturer: object, device: torch.device | str) -> None:
    for has_trees in (True, False):
        graphs = make_graphs(target, capturer, has_trees=has_trees)
        own = target.new_pool(40, BLOCK)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for seed, (lengths, begins) in enumerate(ROUNDS * 2):
            inputs = round_of(lengths, begins, seed, device)
            if seed % 2 and has_trees:
                inputs = with_tree(inputs)
            taps = TAPS if seed % 3 else ()
            found, expected = graphs.run(inputs, taps), eager(target, own, inputs, taps)
            assert found is not None
            torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
            assert (found.taps is None) == (taps == ())
            if taps:
                kept.append((found.taps, expected.taps))
        assert graphs.num_graphs > 1 and not graphs.broken
        # Requests keep taps for rounds: later replays must not write into them.
        for found_taps, expected_taps in kept:
            torch.testing.assert_close(found_taps, expected_taps, atol=1e-4, rtol=1e-4)
        for one, other in zip((*graphs.pool.keys, *graphs.pool.values), (*own.keys, *own.values)):
            # All but the null block, which padding writes.
            torch.testing.assert_close(one[BLOCK:], other[BLOCK:], atol=1e-4, rtol=1e-4)


def test_replayed_rounds_are_the_eager_ones(target):
    assert_rounds_equal(target, StandInCapturer(), "cpu")


@pytest.mark.gpu
def test_cuda_graphs_are_the_eager_passes(tiny_target):
    target = Target.load(tiny_target("llama"), device="cuda")
    with torch.inference_mode():
        assert_rounds_equal(target, CudaCapturer(), "cuda")


def storages(value: object, found: dict[int, int]) -> dict[int, int]:
    """Bytes of every storage that an object holds, by address."""
    if isinstance(value, torch.Tensor):
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, dict):
        for one in value.values():
            storages(one, found)
    elif isinstance(value, (tuple, list)):
        for one in value:
            storages(one, found)
    elif type(value).__module__.startswith("draftsmith.serve"):
        storages({**vars(value), "target": None, "pool": None}, found)
    return found


def test_one_output_serves_all_shapes(target):
    """Not one kept logits tensor a graph: at a vocabulary of 128k those were gigabytes."""
    capturer = Keeping()
    graphs = make_graphs(target, capturer)
    warm_up(graphs)
    assert graphs.num_graphs == len(graphs.shapes) > 10
    rows, width = graphs.shapes.most_tokens, target.vocab_size + 2 * target.hidden_size
    outputs = 4 * rows * width
    inputs = 8 * (5 * rows + graphs.shapes.most_rows * (1 + MAX_BLOCKS))
    assert sum((storages(graphs, {}) | capturer.kept).values()) == outputs + inputs


def test_a_pass_too_large_for_every_graph_is_left_alone(target):
    graphs = make_graphs(target, StandInCapturer(), max_batch=1, per_row=1)
    assert graphs.run(round_of([9], [0], 0), ()) is None
    assert graphs.run(round_of([1], [0], 0), ()) is not None


def test_padding_stays_in_the_null_block(target):
    graphs = make_graphs(target, StandInCapturer())
    # What an earlier round has left there must not be read as a padding row's blocks.
    graphs.run(round_of([2] * 5, [0] * 5, 0), ())
    for part in (*graphs.pool.keys, *graphs.pool.values):
        part.zero_()
    inputs = round_of([2, 2, 2, 3], [0] * 4, 0)
    shape = graphs.shapes.of(4, 9)
    assert shape.num_tokens > 9
    graphs.run(inputs, ())
    own = set(inputs.tables.flatten().tolist())
    written = (
        graphs.pool.keys[0].view(40, BLOCK, -1).abs().sum(dim=(1, 2)).nonzero().flatten().tolist()
    )
    assert set(written) <= own | {NULL_BLOCK}
    views = graphs._inputs.of(shape)
    assert views.tables[4, 0] == NULL_BLOCK
    assert views.lengths.tolist() == [2, 2, 2, 3, shape.num_tokens - 9] + [0] * (shape.num_rows - 5)


def test_a_model_that_cannot_be_captured_is_served_without_graphs(target, caplog):
    class Failing:
        captures = 0

        def capture(self, run):
            self.captures += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    capturer = Failing()
    graphs = make_graphs(target, capturer)
    for lengths in ([1, 1], [1], [1, 1]):
        assert graphs.run(round_of(lengths, [0] * len(lengths), 0), ()) is None
    assert caplog.text.count("cannot be captured") == 1
    assert (graphs.broken, graphs.num_graphs, capturer.captures) == (True, 0, 1)


def test_a_lack_of_memory_leaves_the_shape_out(target, caplog):
    class Small(StandInCapturer):
        """Has no room for more than 4 tokens."""

        def capture(self, run):
            if attempts[-1] > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().capture(run)

    graphs, attempts = make_graphs(target, Small()), []
    clear = graphs._inputs.clear
    graphs._inputs.clear = lambda shape: (attempts.append(shape.num_tokens), clear(shape))
    warm_up(graphs)
    assert len(attempts) == len(graphs.shapes)
    assert not graphs.broken
    assert graphs.num_graphs == sum(shape.num_tokens <= 4 for shape in graphs.shapes)
    assert caplog.text.count("no memory for a CUDA graph") == 1
    assert graphs.run(round_of([3, 3], [0, 0], 0), ()) is None
    assert graphs.run(round_of([2, 2], [0, 0], 0), ()) is not None
    assert len(attempts) == len(graphs.shapes)  # a shape is tried once


def test_drafted_tokens_are_written_into_a_pass(target):
    graphs, plain = make_graphs(target, StandInCapturer()), round_of([3, 2], [3, 4], 0)
    drafted, moves = DraftedIds(torch.tensor([[71, 72], [73, 0]]), None), ([0, 1, 2], [1, 2, 4])
    expected = eager(
        target, graphs.pool, plain._replace(ids=[plain.ids[0], 71, 72, plain.ids[3], 73]), ()
    )
    found = graphs.run(plain._replace(drafted=drafted, moves=moves), ())
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
