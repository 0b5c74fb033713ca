"""One target pass for a whole round: prompt pieces and verify rows of any depth, flattened; logits
only where needed.

Legend: T tokens of the pass, B rows, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.quirks.recurrent import StateLayers
from draftsmith.drafters.quirks.recurrent_states import (
    RowRead,
    Split,
    StatePass,
    StateSlots,
    round_waves,
)
from draftsmith.drafters.target.adapters import Adapters
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.drafters.trees.nodes import NodeLayout
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.dispatch import Upload, sent
from draftsmith.serve.engine.graphs import DraftedIds, PassGraphs, PassInputs
from draftsmith.serve.engine.proposal import RoundProposal
from draftsmith.serve.engine.round import PassOutput, prompt_positions
from draftsmith.serve.engine.scheduler import ScheduledRow
from draftsmith.serve.requests.request import Request


class BlockTables:
    """The block ids of running requests as one tensor; a request's slot is its row."""

    def __init__(self, max_batch: int, max_blocks: int, device: torch.device):
        self.host = torch.full((max_batch, max_blocks), NULL_BLOCK, dtype=torch.int64)
        self.device = device
        # of each row: owner of the blocks, how often it was preempted, how many are written
        self._written = [("", 0, 0)] * max_batch

    def of(self, requests: Sequence[Request]) -> torch.Tensor:
        """[B, most blocks of any of them] int64, on the host."""
        for request in requests:
            slot, blocks = request.slot, request.blocks
            owner, num_preemptions, written = self._written[slot]
            # A preempted request comes back with other blocks under the same id.
            is_new = owner != request.id or num_preemptions != request.num_preemptions
            if is_new or written != len(blocks):
                begin = 0 if is_new else written
                self.host[slot, begin : len(blocks)] = torch.tensor(blocks[begin:])
                self._written[slot] = (request.id, request.num_preemptions, len(blocks))
        if len(requests) == 1:
            # Of one row there is nothing to pick, which is dear on a CPU. It is written between
            # rounds alone.
            slot = requests[0].slot
            return self.host[slot : slot + 1, : len(requests[0].blocks)]
        width = max([len(request.blocks) for request in requests])
        (slots,) = sent(self.host.device, [request.slot for request in requests])
        return self.host[:, :width].index_select(0, slots)


class PackedRows(NamedTuple):
    """Rows of a pass one after another; T tokens."""

    ids: list[int]  # [T]
    positions: list[int]  # [T]
    lengths: list[int]  # of each row
    begins: list[int]  # first index of each row in T
    logit_rows: list[int]  # indices into T whose logits decide a token
    prompt_rows: list[int]  # and whose logits give a prompt token's logprob
    awaited: list[int]  # and whose ids the host does not have

    @property
    def head_rows(self) -> list[int]:
        """Both. A pass of prompt pieces alone decides nothing; a head cannot run on no rows, so it
        runs on one that is not read."""
        return (self.logit_rows + self.prompt_rows) or [0]


def pack(
    rows: Sequence[ScheduledRow], sizes: Sequence[int], known: Sequence[list[int]] = ()
) -> PackedRows:
    """`sizes` drafted tokens of each row; their ids are 0 here but for those of the first rows that
    are `known`."""
    packed = PackedRows([], [], [], [], [], [], [])
    for index, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        begin, ids = len(packed.ids), packed.ids
        packed.begins.append(begin)
        ids += row.request.tokens[row.begin : row.begin + row.count]
        if len(ids) == begin:
            packed.awaited.append(begin)
            ids.append(0)
        ids += known[index] if index < len(known) else [0] * size
        if row.request.params.prompt_logprobs is not None:
            packed.prompt_rows.extend(
                [begin + position - row.begin for position in prompt_positions(row)]
            )
        packed.positions.extend(range(row.begin, row.begin + row.count + size))
        packed.lengths.append(row.count + size)
        if row.samples:
            packed.logit_rows.extend(range(len(ids) - size - 1, len(ids)))
    return packed


class PlannedPass(NamedTuple):
    """A pass before its drafted tokens are there."""

    rows: Sequence[ScheduledRow]
    sizes: list[int]  # drafted tokens of each
    width: int  # of the drafted tokens [B, width] to come
    packed: PackedRows
    inputs: PassInputs


class TargetRunner:
    """`graphs` None: every pass is run as it is, as is one in which a row has an adapter. `states`
    None: the target has no layers with a state."""

    def __init__(
        self,
        target: Target,
        pool: PagedPool,
        graphs: PassGraphs | None = None,
        states: StateSlots | None = None,
        adapters: Adapters | None = None,
    ):
        self.target, self.pool, self.device, self.graphs = target, pool, target.device, graphs
        self.states, self.adapters = states, adapters
        self._planned: PlannedPass | None = None

    def gives_states(self, rows: Sequence[ScheduledRow]) -> bool:
        """True when a pass of these rows gives every state, of which they can join taps."""
        adapted = self.adapters is not None and any(row.request.options.adapter for row in rows)
        return self.target.captured and self.graphs is None and not adapted

    def expected(self, rows: Sequence[ScheduledRow], tables: torch.Tensor) -> tuple[list[int], ...]:
        """Columns of the host that `run` will read if all `rows` get k drafted tokens; the pass is
        kept for it. `tables` as for `run`, on the host."""
        sizes = [row.k for row in rows]
        self._planned = self._plan(rows, sizes, max(sizes), tables)
        inputs = self._planned.inputs
        return inputs.static or inputs.columns

    def _plan(
        self,
        rows: Sequence[ScheduledRow],
        sizes: list[int],
        width: int,
        tables: torch.Tensor,
        known: Sequence[list[int]] = (),
    ) -> PlannedPass:
        """A pass with `sizes` drafted tokens of each row, `known` or to come as [B, width]."""
        packed = pack(rows, sizes, known)
        moves: tuple[list[int], ...] = ()
        if width:
            moves = moves_of(rows, sizes, packed.begins, width)
        elif packed.awaited:
            moves = (list(range(len(rows))), packed.awaited)
        inputs = PassInputs(*packed[:3], packed.head_rows, tables, moves=moves)
        if self.graphs is not None:
            inputs = inputs._replace(static=self.graphs.columns(inputs))
        return PlannedPass(rows, sizes, width, packed, inputs)

    def run(
        self,
        rows: Sequence[ScheduledRow],
        proposal: RoundProposal | None,
        tables: torch.Tensor,
        taps: Sequence[int],
        upload: Upload | None = None,
        newest: torch.Tensor | None = None,
    ) -> PassOutput:
        """Run the pass.

        Args:
            rows: those that draft come first, those that do not sample last.
            tables: [rows, blocks] block ids.
            upload: what is on the device already.
            newest: [rows, 1] ids of rows whose one token the host does not have.
        """
        sizes = [] if proposal is None else proposal.sizes
        sizes = [*sizes, *[0] * (len(rows) - len(sizes))]
        known = None if proposal is None else proposal.known
        drafted, width = None if newest is None else DraftedIds(newest, None), 0
        if proposal is not None and known is None and any(sizes):
            nodes = None if proposal.tree is None else NodeLayout.of(proposal.tree)
            drafted, width = DraftedIds(proposal.tokens, nodes), proposal.tokens.shape[1]
        planned, self._planned = self._planned, None
        if planned is None or planned.rows is not rows or planned[1:3] != (sizes, width):
            ids = [row[2 : 2 + row[1]] for row in known or ()]
            planned = self._plan(rows, sizes, width, tables, ids)
        packed, logit_rows = planned.packed, planned.inputs.logit_rows
        inputs = planned.inputs._replace(tables=tables, drafted=drafted, upload=upload)
        split = None if self.states is None else self._split(rows, sizes)
        adapted = None
        if self.adapters is not None:
            adapted = adapted_tokens(rows, packed.begins, packed.lengths, self.device)
        if self.adapters is None or not adapted:
            output = None if self.graphs is None else self.graphs.run(inputs, taps)
            if output is None:
                output = self._forward(inputs, taps, split)
        else:
            with self.adapters.of(adapted, len(packed.ids)):
                output = self._forward(inputs, taps, split)
        count = len(logit_rows) - len(packed.prompt_rows)
        logits = output.logits if count == len(logit_rows) else output.logits[:count]
        prompt_logits = output.logits[count:]
        return PassOutput(logits, output.taps, packed.begins, prompt_logits, output.every)

    def _split(self, rows: Sequence[ScheduledRow], sizes: Sequence[int]) -> Split:
        """Pieces of the pass for layers with a state."""
        reads = [
            state_read(self.target.state_layers, row, size)
            for row, size in zip(rows, sizes, strict=True)
        ]
        return Split(round_waves(reads), self.states, self.device)

    def _forward(
        self, inputs: PassInputs, taps: Sequence[int], split: Split | None
    ) -> TargetOutput:
        ids, positions, lengths, logit_rows, *moves = inputs.sent(self.device, *inputs.columns)
        drafted = inputs.drafted
        tree = None if drafted is None else drafted.write(ids, positions, *moves)
        context: AttentionContext = PagedPass(
            self.pool, inputs.tables, positions, lengths, tree=tree
        )
        if split is not None:
            context = StatePass(context, split)
        return self.target.forward(ids[None], positions[None], context, logit_rows, taps)


def moves_of(
    rows: Sequence[ScheduledRow], sizes: Sequence[int], begins: Sequence[int], width: int
) -> tuple[list[int], list[int]]:
    """Moves of drafted tokens [B, width] into a pass: `sizes` of each row, which begins at
    `begins`."""
    sources: list[int] = []
    targets: list[int] = []
    for index, (row, size, begin) in enumerate(zip(rows, sizes, begins, strict=True)):
        sources += range(index * width, index * width + size)
        targets += range(begin + row.count, begin + row.count + size)
    return sources, targets


def state_read(layers: StateLayers, row: ScheduledRow, num_drafted: int) -> RowRead:
    """The row's share of a pass over layers with a state; its slot is the number of its states."""
    request = row.request
    return layers.row_read(request.slot, request.cache.state, row.begin, row.count, num_drafted)


def adapted_tokens(
    rows: Sequence[ScheduledRow],
    begins: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """[n] int64 indices of the pass's tokens by adapter; of rows without one there are none."""
    found: dict[str, list[int]] = {}
    for row, begin, length in zip(rows, begins, lengths, strict=True):
        if adapter := row.request.options.adapter:
            found.setdefault(adapter, []).extend(range(begin, begin + length))
    return {name: sent(device, indices)[0] for name, indices in found.items()}
