"""CUDA graphs of the target's decoding passes: a pass of a few rows costs one launch instead of
hundreds.

A graph is captured once for each shape (rows, tokens, tree or not, taps) and replayed whenever a
round fits into it: what is left over is filled with rows that read and write the null block, whose
results are not read. It stays valid for the life of the engine, because everything it reads stays
at its address: weights, pools and its own inputs. Passes that hold pieces of prompts run as they
are; they are long enough to keep a device busy.

Never run on a device so far: the tests drive it with a capturer of their own on the CPU, and those
marked `gpu` wait for one.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import Capturable, ServingDrafter
from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool, TreeLayout
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.cuda_graphs import Capturer, CudaCapturer, Graph, row_buckets, sizes_up_to
from draftsmith.kernels.dispatch import sent
from draftsmith.serve.parallel import LeadingTarget

log = logging.getLogger(__name__)

MOST_TOKENS = 512  # of a graph
MOST_LOGITS = 1 << 26  # of a graph, whose every token has a place for its own: 256 MiB


class PassInputs(NamedTuple):
    """Inputs of one target pass on the host; B rows, T tokens, R rows of logits."""

    ids: list[int]  # [T]
    positions: list[int]  # [T]
    lengths: list[int]  # [B]
    logit_rows: list[int]  # [R] indices into T
    tables: torch.Tensor  # [B, blocks] int64 on the device
    tree: TreeLayout | None
    late: LateIds | None = None


class LateIds(NamedTuple):
    """Ids of a pass that the host does not have: drafted tokens, which stay on the device."""

    tokens: torch.Tensor  # [B, K] int64, on the device
    sources: list[int]  # [n] of the flattened tokens
    places: list[int]  # [n] indices into T

    def write(self, ids: torch.Tensor) -> None:
        """Write them into the pass's `ids` [T]."""
        sources, places = sent(ids.device, self.sources, self.places)
        ids.index_copy_(0, places, self.tokens.flatten()[sources])


class Shape(NamedTuple):
    num_rows: int
    num_tokens: int
    has_tree: bool
    taps: tuple[int, ...]


class StaticInputs:
    """The inputs of one shape at fixed addresses. The host's numbers arrive in one copy, from
    memory that the device can read."""

    def __init__(self, shape: Shape, max_blocks: int, device: torch.device):
        tokens, rows = shape.num_tokens, shape.num_rows
        pinned = device.type == "cuda"
        self._host = torch.zeros(3 * tokens + rows, dtype=torch.int64, pin_memory=pinned)
        self._flat = torch.zeros(3 * tokens + rows, dtype=torch.int64, device=device)
        self.ids, self.positions, self.logit_rows, self.lengths = self._flat.split(
            [tokens, tokens, tokens, rows]
        )
        self.tables = torch.full((rows, max_blocks), NULL_BLOCK, dtype=torch.int64, device=device)
        self.tree = None
        if shape.has_tree:
            self.tree = TreeLayout(
                *(torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(3))
            )
        self.shape = shape

    def fill(self, inputs: PassInputs) -> None:
        """The round's rows first, then padding: every surplus row one token, the last one all
        tokens that are left."""
        num_tokens, num_rows = len(inputs.ids), len(inputs.lengths)
        spare_tokens, spare_rows = (
            self.shape.num_tokens - num_tokens,
            self.shape.num_rows - num_rows,
        )
        lengths = padding_lengths(spare_rows, spare_tokens)
        positions = [position for length in lengths for position in range(length)]
        logit_rows = inputs.logit_rows + [0] * (self.shape.num_tokens - len(inputs.logit_rows))
        numbers = (
            inputs.ids
            + [0] * spare_tokens
            + inputs.positions
            + positions
            + logit_rows
            + inputs.lengths
            + lengths
        )
        self._host.copy_(torch.tensor(numbers, dtype=torch.int64))
        # The copy is over before the host writes again: every round waits for its tokens.
        self._flat.copy_(self._host, non_blocking=True)
        if inputs.late is not None:
            inputs.late.write(self.ids)
        self.tables[:num_rows, : inputs.tables.shape[1]].copy_(inputs.tables)
        self.tables[num_rows:] = NULL_BLOCK
        if self.tree is not None:
            self._fill_tree(inputs, num_tokens)

    def _fill_tree(self, inputs: PassInputs, num_tokens: int) -> None:
        assert self.tree is not None and inputs.tree is not None
        for static, given in zip(self.tree, inputs.tree):
            static[:num_tokens].copy_(given)
        self.tree.kv_indices[num_tokens:].copy_(self.positions[num_tokens:])
        self.tree.ancestors[num_tokens:] = -1
        self.tree.first[num_tokens:] = 0


def padding_lengths(num_rows: int, num_tokens: int) -> list[int]:
    if num_rows == 0:
        assert num_tokens == 0
        return []
    return [1] * (num_rows - 1) + [num_tokens - num_rows + 1]


class PassGraphs:
    """`run` gives a pass's output from a graph, or None where the pass is better run as it is.

    The output is only good until the next pass, but for taps, which requests keep.
    """

    def __init__(
        self,
        target: Target,
        pool: PagedPool,
        *,
        max_batch: int,
        max_blocks: int,
        capturer: Capturer,
    ):
        self.target, self.pool, self.max_blocks, self.capturer = target, pool, max_blocks, capturer
        self.rows = row_buckets(max_batch)
        self.tokens = token_buckets(min(MOST_TOKENS, MOST_LOGITS // target.vocab_size))
        self._graphs: dict[Shape, tuple[StaticInputs, Graph, TargetOutput]] = {}
        self._broken = False

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(self, inputs: PassInputs, taps: Sequence[int]) -> TargetOutput | None:
        shape = self.shape_for(inputs, taps)
        if shape is None or self._broken:
            return None
        if shape not in self._graphs and not self._capture(shape, inputs):
            return None
        static, graph, output = self._graphs[shape]
        static.fill(inputs)
        graph.replay()
        logits = output.logits[: len(inputs.logit_rows)]
        return TargetOutput(
            logits, None if output.taps is None else output.taps[: len(inputs.ids)].clone()
        )

    def shape_for(self, inputs: PassInputs, taps: Sequence[int]) -> Shape | None:
        """The smallest that the pass fits into with a row for what is left over; None: it is too
        large for any."""
        num_rows, num_tokens = len(inputs.lengths), len(inputs.ids)
        rest = (inputs.tree is not None, tuple(taps))
        if num_rows in self.rows and num_tokens in self.tokens:
            return Shape(num_rows, num_tokens, *rest)
        row = bisect.bisect_left(self.rows, num_rows + 1)
        if row == len(self.rows):
            return None
        token = bisect.bisect_left(self.tokens, num_tokens + self.rows[row] - num_rows)
        return (
            Shape(self.rows[row], self.tokens[token], *rest) if token < len(self.tokens) else None
        )

    def _capture(self, shape: Shape, inputs: PassInputs) -> bool:
        static = StaticInputs(shape, self.max_blocks, self.target.device)
        static.fill(inputs)
        try:
            graph, output = self.capturer.capture(lambda: self._forward(static))
        except RuntimeError as error:
            # A model that looks at values on the host cannot be captured; it is served without
            # graphs.
            log.warning(
                "the target's passes cannot be captured as CUDA graphs (%s)",
                str(error).strip().splitlines()[0],
            )
            self._broken = True
            return False
        self._graphs[shape] = (static, graph, output)
        return True

    def _forward(self, static: StaticInputs) -> TargetOutput:
        context = PagedPass(
            self.pool, static.tables, static.positions, static.lengths, tree=static.tree
        )
        return self.target.forward(
            static.ids[None], static.positions[None], context, static.logit_rows, static.shape.taps
        )


def can_capture(target: Target) -> bool:
    """A pass of a sharded target is a word to the other processes too, which no graph repeats."""
    return target.device.type == "cuda" and not isinstance(target, LeadingTarget)


def capture_drafts(
    drafter: ServingDrafter | None, pool: PagedPool | None, *, max_batch: int, max_blocks: int
) -> None:
    """Lets a drafter draft by graphs from `pool`, if it can."""
    if isinstance(drafter, Capturable) and pool is not None:
        drafter.capture(pool, max_batch=max_batch, max_blocks=max_blocks, capturer=CudaCapturer())


def token_buckets(most: int) -> list[int]:
    """Every number up to 8, where a token more is a share that counts, then powers of two and the
    numbers half way."""
    return sorted({*range(1, min(most, 8) + 1), *sizes_up_to(most)})
