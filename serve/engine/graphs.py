"""CUDA graphs of the target's decoding passes: a pass of a few rows costs one launch instead of
hundreds.

Few shapes (rows, tokens) serve every round in which each token's logits decide something: what a
round leaves over of its shape is padding in the null block, whose results are not read. Passes that
hold pieces of prompts run as they are; they are long enough to keep a device busy.

All shapes read the same inputs and write the same outputs, as large as the largest needs: a further
graph costs no memory but its own nodes. It stays valid for the life of the engine, because
everything it reads stays at its address: weights, pools, inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.drafters.trees.nodes import NodeLayout
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool, TreeLayout
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.cuda_graphs import Capturer, Graph, GraphShapes, Shape, Shapes
from draftsmith.kernels.dispatch import Upload, sent
from draftsmith.serve.control.control import MAX_AUTO_K

MOST_TOKENS = 512  # of a graph
MOST_LOGITS = 1 << 26  # of the buffer, which has a row for each token of a graph: 256 MiB


class PassInputs(NamedTuple):
    """Inputs of one target pass on the host; B rows, T tokens, R rows of logits."""

    ids: list[int]  # [T]
    positions: list[int]  # [T]
    lengths: list[int]  # [B]
    logit_rows: list[int]  # [R] indices into T; those of prompts' logprobs come last
    tables: torch.Tensor  # [B, blocks] int64 on the device
    begins: Sequence[int] = ()  # first index of each row in T
    num_prompt_rows: int = 0  # of R
    drafted: DraftedIds | None = None
    # [n] of the flattened tokens that are on the device, [n] indices into T that they go to
    moves: tuple[list[int], ...] = ()
    upload: Upload | None = None  # what is on the device already
    static: tuple[list[int], ...] | None = None  # as `PassGraphs.columns` gives them

    @property
    def columns(self) -> tuple[list[int], ...]:
        """All of the host's numbers."""
        return (*self[:4], *self.moves)

    def sent(self, device: torch.device, *columns: list[int]) -> tuple[torch.Tensor, ...]:
        """Columns of the host on the pass's device."""
        return sent(device, *columns) if self.upload is None else self.upload.of(*columns)

    @property
    def has_trees(self) -> bool:
        return self.drafted is not None and self.drafted.nodes is not None

    @property
    def decides_all(self) -> bool:
        """True where every token's logits are asked for, in order: no piece of a prompt is
        there."""
        count = len(self.ids)
        return len(self.logit_rows) == count and self.logit_rows == list(range(count))


class DraftedIds(NamedTuple):
    """Drafted tokens of a pass, which stay on its device."""

    tokens: torch.Tensor  # [B, K] int64
    nodes: NodeLayout | None  # where they are trees

    def write(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
    ) -> TreeLayout | None:
        """Write them into the pass's `ids` [T]; `sources` and `targets` are its moves, as tensors.
        The layout of trees, whose `positions` [T] are changed in place."""
        ids.index_copy_(0, targets, self.tokens.take(sources))
        return None if self.nodes is None else self.nodes.lay_out(positions, sources, targets)


def longest_round(max_batch: int, per_row: int) -> int:
    """Tokens of the longest round, but for requests that ask for more than the engine's k; of one
    that runs alone also those that `auto` goes up to."""
    return max(max_batch * per_row, 1 + MAX_AUTO_K if per_row > 1 else 1)


class Views(NamedTuple):
    """The inputs of one shape."""

    ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    lengths: torch.Tensor  # [B]
    tables: torch.Tensor  # [B, max_blocks]
    tree: TreeLayout | None


class StaticInputs:
    """Inputs of all shapes at fixed addresses, each shape in the first of them."""

    def __init__(self, shapes: Shapes, max_blocks: int, device: torch.device, *, has_trees: bool):
        whole = {"dtype": torch.int64, "device": device}
        self._flat = torch.zeros(2 * shapes.most_tokens + shapes.most_rows, **whole)
        self._tables = torch.full((shapes.most_rows, max_blocks), NULL_BLOCK, **whole)
        self._tree = None
        if has_trees:
            self._tree = TreeLayout(*torch.zeros(3, shapes.most_tokens, **whole))
        self._views: dict[Shape, Views] = {}

    def of(self, shape: Shape) -> Views:
        if shape not in self._views:
            self._views[shape] = self._of(shape)
        return self._views[shape]

    def _of(self, shape: Shape) -> Views:
        rows, tokens = shape
        ids, positions, lengths = self._flat[: 2 * tokens + rows].split([tokens, tokens, rows])
        tree = None
        if self._tree is not None:
            tree = TreeLayout(*(part[:tokens] for part in self._tree))
        return Views(ids, positions, lengths, self._tables[:rows], tree)

    def clear(self, shape: Shape) -> None:
        """Padding alone."""
        none = torch.zeros(0, 0, dtype=torch.int64, device=self._tables.device)
        self.fill(shape, PassInputs([], [], [], [], none))

    def fill(self, shape: Shape, inputs: PassInputs) -> None:
        columns = inputs.static or static_columns(shape, inputs)
        numbers, *moves = inputs.sent(self._flat.device, *columns)
        self._flat[: len(numbers)].copy_(numbers)
        views, tree = self.of(shape), None
        if inputs.drafted is not None:
            count = len(inputs.ids)
            tree = inputs.drafted.write(views.ids[:count], views.positions[:count], *moves)
        num_rows = len(inputs.lengths)
        self._tables[:num_rows, : inputs.tables.shape[1]].copy_(inputs.tables)
        if shape.num_tokens > len(inputs.ids):
            self._tables[num_rows, 0] = NULL_BLOCK
        if self._tree is not None:
            self._fill_tree(views, tree)

    def _fill_tree(self, views: Views, tree: TreeLayout | None) -> None:
        """Tokens of no tree see all up to their own."""
        assert views.tree is not None
        count = 0
        if tree is not None:
            count = len(tree.kv_indices)
            for static, given in zip(views.tree, tree, strict=True):
                static[:count].copy_(given)
        views.tree.kv_indices[count:].copy_(views.positions[count:])
        views.tree.ancestors[count:] = -1
        views.tree.first[count:] = 0


def static_columns(shape: Shape, inputs: PassInputs) -> tuple[list[int], ...]:
    """Columns of the host that a pass in this shape reads: its numbers in the order of
    `StaticInputs`, and where drafted tokens go.

    The round's rows come first, then one of all tokens that are left, then empty ones. Padding is
    at position 0, so that it attends to as little as can be.
    """
    spare_tokens = shape.num_tokens - len(inputs.ids)
    spare_rows = shape.num_rows - len(inputs.lengths)
    numbers = (
        inputs.ids
        + [0] * spare_tokens
        + inputs.positions
        + [0] * spare_tokens
        + inputs.lengths
        + [spare_tokens] * min(spare_rows, 1)
        + [0] * (spare_rows - 1)
    )
    return (numbers, *inputs.moves)


class StaticOutputs:
    """Outputs of all shapes at fixed addresses, each shape in the first rows."""

    def __init__(self, most_tokens: int, like: TargetOutput):
        self.logits = _rows_like(like.logits, most_tokens)
        self.taps = None if like.taps is None else _rows_like(like.taps, most_tokens)

    def take(self, output: TargetOutput) -> None:
        self.logits[: len(output.logits)].copy_(output.logits)
        if self.taps is not None and output.taps is not None:
            self.taps[: len(output.taps)].copy_(output.taps)


def _rows_like(values: torch.Tensor, count: int) -> torch.Tensor:
    return values.new_zeros(count, values.shape[1])


class PassGraphs(GraphShapes[Shape, None]):
    """`run` gives a pass's output from a graph, or None where the pass is better run as it is.

    The output is only good until the next pass, but for taps, which requests keep.

    Args:
        per_row: most tokens of a row that drafts.
        taps: that passes may ask for; all of them are always there.
        has_trees: whether rows may be trees.
    """

    def __init__(
        self,
        target: Target,
        pool: PagedPool,
        *,
        max_batch: int,
        max_blocks: int,
        capturer: Capturer,
        per_row: int,
        taps: tuple[int, ...],
        has_trees: bool,
    ):
        super().__init__(capturer, "the target's passes")
        self.target, self.pool, self.taps = target, pool, taps
        self.shapes = Shapes(
            max_batch=max_batch,
            per_row=per_row,
            most_tokens=min(
                MOST_TOKENS, MOST_LOGITS // target.vocab_size, longest_round(max_batch, per_row)
            ),
        )
        self._inputs = StaticInputs(self.shapes, max_blocks, target.device, has_trees=has_trees)
        self._has_trees = has_trees
        self._outputs: StaticOutputs | None = None

    @torch.inference_mode()
    def run(self, inputs: PassInputs, taps: tuple[int, ...]) -> TargetOutput | None:
        shape = self._shape_of(inputs)
        if shape is None or tuple(taps) not in ((), self.taps):
            return None
        if (inputs.has_trees and not self._has_trees) or (found := self.prepare(shape)) is None:
            return None
        self._inputs.fill(shape, inputs)
        graph, _ = found
        graph.replay()
        outputs, count = self._outputs, len(inputs.ids)
        assert outputs is not None
        kept = outputs.taps[:count].clone() if taps and outputs.taps is not None else None
        return TargetOutput(outputs.logits[:count], kept)

    def columns(self, inputs: PassInputs) -> tuple[list[int], ...] | None:
        """Columns of the host that `run` would read; None where there is no graph."""
        shape = self._shape_of(inputs)
        return None if shape is None or shape not in self else static_columns(shape, inputs)

    def _shape_of(self, inputs: PassInputs) -> Shape | None:
        if not inputs.decides_all:
            return None
        return self.shapes.of(len(inputs.lengths), len(inputs.ids))

    @torch.inference_mode()
    def prepare(self, shape: Shape) -> tuple[Graph, None] | None:
        """The graph of a shape, captured where there is none yet. What that reads and writes is
        padding."""
        return self.find(shape, lambda: self._pass(shape), lambda: self._clear(shape))

    def _clear(self, shape: Shape) -> None:
        self._inputs.clear(shape)
        if self._outputs is None:
            self._outputs = StaticOutputs(self.shapes.most_tokens, self._forward(shape))

    def _pass(self, shape: Shape) -> None:
        assert self._outputs is not None
        self._outputs.take(self._forward(shape))

    def _forward(self, shape: Shape) -> TargetOutput:
        ids, positions, lengths, tables, tree = self._inputs.of(shape)
        context = PagedPass(self.pool, tables, positions, lengths, tree=tree)
        rows = torch.arange(len(ids), device=ids.device)
        return self.target.forward(ids[None], positions[None], context, rows, self.taps)
