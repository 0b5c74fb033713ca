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


def pack(
    rows: Sequence[ScheduledRow],
    sizes: Sequence[int],
    width: int,
    tables: torch.Tensor,
    known: Sequence[list[int]] = (),
) -> PassInputs:
    """Rows one after another with `sizes` drafted tokens of each, which come as [B, width]; width
    0: those of the first rows are `known`. Ids that the host does not have are 0."""
    inputs = PassInputs([], [], [], [], tables)
    ids, begins, prompts = inputs.ids, list[int](), list[int]()
    sources, targets = list[int](), list[int]()
    for index, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        begin, known_end = len(ids), row.begin + row.count
        begins.append(begin)
        ids += row.request.tokens[row.begin : known_end]
        if len(ids) == begin:
            sources.append(index)
            targets.append(begin)
            ids.append(0)
        if width:
            sources += range(index * width, index * width + size)
            targets += range(len(ids), len(ids) + size)
        ids += known[index] if index < len(known) else [0] * size
        if row.request.params.prompt_logprobs is not None:
            prompts += [begin + position - row.begin for position in prompt_positions(row)]
        inputs.positions.extend(range(row.begin, known_end + size))
        inputs.lengths.append(row.count + size)
        if row.samples:
            inputs.logit_rows.extend(range(len(ids) - size - 1, len(ids)))
    inputs.logit_rows.extend(prompts)
    if not inputs.logit_rows:
        # A pass of prompt pieces alone decides nothing; a head cannot run on no rows, so it runs on
        # one that is not read.
        inputs.logit_rows.append(0)
    moves = (sources, targets) if width or targets else ()
    return inputs._replace(begins=begins, moves=moves, num_prompt_rows=len(prompts))


class PlannedPass(NamedTuple):
    """A pass before its drafted tokens are there."""

    rows: Sequence[ScheduledRow]
    sizes: list[int]  # drafted tokens of each
    width: int  # of the drafted tokens [B, width] to come
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
        inputs = pack(rows, sizes, width, tables, known)
        if self.graphs is not None:
            inputs = inputs._replace(static=self.graphs.columns(inputs))
        return PlannedPass(rows, sizes, width, inputs)

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
        inputs = planned.inputs._replace(tables=tables, drafted=drafted, upload=upload)
        split = None if self.states is None else self._split(rows, sizes)
        adapted = None
        if self.adapters is not None:
            adapted = adapted_tokens(rows, inputs.begins, inputs.lengths, self.device)
        if self.adapters is None or not adapted:
            output = None if self.graphs is None else self.graphs.run(inputs, taps)
            if output is None:
                output = self._forward(inputs, taps, split)
        else:
            with self.adapters.of(adapted, len(inputs.ids)):
                output = self._forward(inputs, taps, split)
        count = len(inputs.logit_rows) - inputs.num_prompt_rows
        logits = output.logits[:count] if inputs.num_prompt_rows else output.logits
        prompt_logits = output.logits[count:]
        return PassOutput(logits, output.taps, inputs.begins, prompt_logits, output.every)

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
