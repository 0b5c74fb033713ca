"""One target pass for a whole round: prompt pieces and verify rows of any depth, flattened; logits
only where needed.

Legend: T tokens of the pass, B rows, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.adapters.adapters import Adapters
from draftsmith.drafters.recurrent.mixers import StateLayers
from draftsmith.drafters.recurrent.pieces import RowRead, Split, StatePass, round_waves
from draftsmith.drafters.recurrent.slots import StateSlots
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.drafters.trees.layout import NodeLayout
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool, TreeLayout
from draftsmith.kernels.attention.repeated_numbers import repeated_numbers
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.dispatch import Upload, reads_freely, sent
from draftsmith.serve.engine.graphs import LateIds, PassGraphs, PassInputs
from draftsmith.serve.engine.round import PassOutput, RoundTree, prompt_positions
from draftsmith.serve.engine.scheduler import ScheduledRow
from draftsmith.serve.engine.trees import lay_out
from draftsmith.serve.requests.request import Request


class BlockTables:
    """The block ids of running requests as one tensor; a request's slot is its row."""

    def __init__(self, max_batch: int, max_blocks: int, device: torch.device):
        self.host = torch.full((max_batch, max_blocks), NULL_BLOCK, dtype=torch.int64)
        self.device = device
        # owner of the blocks in a row, and how many are written
        self._written: list[tuple[tuple[str, int], int]] = [(("", 0), 0)] * max_batch

    def of(self, requests: Sequence[Request]) -> torch.Tensor:
        """[B, most blocks of any of them] int64, on the host."""
        for request in requests:
            holder, written = self._written[request.slot]
            # A preempted request comes back with other blocks under the same id.
            owner = (request.id, request.num_preemptions)
            if owner != holder:
                written = 0
            if written < len(request.blocks):
                self.host[request.slot, written : len(request.blocks)] = torch.tensor(
                    request.blocks[written:]
                )
            self._written[request.slot] = (owner, len(request.blocks))
        if len(requests) == 1:
            # Of one row there is nothing to pick, which is dear on a CPU. It is written between
            # rounds alone.
            slot = requests[0].slot
            return self.host[slot : slot + 1, : len(requests[0].blocks)]
        width = max([len(request.blocks) for request in requests])
        return self.host[[request.slot for request in requests], :width]


class PackedRows(NamedTuple):
    """Rows of a pass one after another; T tokens."""

    ids: list[int]  # [T]
    positions: list[int]  # [T]
    lengths: list[int]  # of each row
    begins: list[int]  # first index of each row in T
    logit_rows: list[int]  # indices into T whose logits decide a token
    prompt_rows: list[int]  # and whose logits give a prompt token's logprob

    @property
    def head_rows(self) -> list[int]:
        """Both. A pass of prompt pieces alone decides nothing; a head cannot run on no rows, so it
        runs on one that is not read."""
        return (self.logit_rows + self.prompt_rows) or [0]


def pack(rows: Sequence[ScheduledRow], drafts: Sequence[Sequence[int]]) -> PackedRows:
    packed = PackedRows([], [], [], [], [], [])
    for row, drafted in zip(rows, drafts, strict=True):
        begin, ids = len(packed.ids), packed.ids
        packed.begins.append(begin)
        ids += row.request.tokens[row.begin : row.begin + row.count]
        ids += drafted
        if row.request.wants_prompt_logprobs:
            packed.prompt_rows.extend(
                [begin + position - row.begin for position in prompt_positions(row)]
            )
        packed.positions.extend(range(row.begin, row.begin + row.count + len(drafted)))
        packed.lengths.append(row.count + len(drafted))
        if row.samples:
            packed.logit_rows.extend(range(len(ids) - len(drafted) - 1, len(ids)))
    return packed


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

    def joins_later(self, rows: Sequence[ScheduledRow]) -> bool:
        """True when a pass of these rows gives every state, of which taps can be joined later."""
        adapted = self.adapters is not None and any(row.request.options.adapter for row in rows)
        eager = self.graphs is None and reads_freely(self.device)
        return self.target.captured and eager and not adapted

    def foreseen(
        self, rows: Sequence[ScheduledRow], budgets: Sequence[int], tables: torch.Tensor
    ) -> tuple[list[int], ...]:
        """Columns of the host that a pass reads, if the first rows get as many drafted tokens as
        their `budgets` and these stay on the device; `tables` as for `run`, on the host."""
        drafts = [[0] * budget for budget in budgets] + [[]] * (len(rows) - len(budgets))
        packed, late = pack(rows, drafts), None
        if any(budgets):
            none = torch.empty(len(budgets), max(budgets), dtype=torch.int64)
            late = place_late(rows, drafts, packed.begins, none)
        inputs = PassInputs(*packed[:3], packed.head_rows, tables, None, late)
        by_graph = None if self.graphs is None else self.graphs.columns(inputs)
        return inputs.columns if by_graph is None else by_graph

    def run(
        self,
        rows: Sequence[ScheduledRow],
        drafts: Sequence[Sequence[int]],
        tables: torch.Tensor,
        taps: Sequence[int],
        tree: RoundTree | None = None,
        late: torch.Tensor | None = None,
        upload: Upload | None = None,
    ) -> PassOutput:
        """Run the pass.

        Args:
            drafts: drafted tokens of each row, chains or nodes of `tree`; rows that do not sample
                come last.
            tables: [rows, blocks] block ids.
            late: [B, K] the drafted tokens, where `drafts` and `tree` have them by their number
                alone.
            upload: what is on the device already; None on a CPU.
        """
        packed = pack(rows, drafts)
        positions, layout = packed.positions, None
        if tree is not None and late is None:
            positions, layout = lay_out(rows, tree, self.device)
        logit_rows, late_ids = packed.head_rows, None
        if late is not None:
            nodes = None if tree is None else NodeLayout.of(tree.draft)
            late_ids = place_late(rows, drafts, packed.begins, late)._replace(nodes=nodes)
        inputs = PassInputs(
            packed.ids, positions, packed.lengths, logit_rows, tables, layout, late_ids, upload
        )
        split = None if self.states is None else self._split(rows, drafts)
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

    def _split(self, rows: Sequence[ScheduledRow], drafts: Sequence[Sequence[int]]) -> Split:
        """Pieces of the pass for layers with a state."""
        reads = [
            state_read(self.target.state_layers, row, len(drafted))
            for row, drafted in zip(rows, drafts, strict=True)
        ]
        return Split(round_waves(reads), self.states, self.device)

    def _forward(
        self, inputs: PassInputs, taps: Sequence[int], split: Split | None
    ) -> TargetOutput:
        (ids, positions, lengths, logit_rows), tree = pass_tensors(inputs, self.device)
        context: AttentionContext = PagedPass(
            self.pool, inputs.tables, positions, lengths, tree=tree
        )
        if split is not None:
            context = StatePass(context, split)
        return self.target.forward(ids[None], positions[None], context, logit_rows, taps)


def pass_tensors(
    inputs: PassInputs, device: torch.device
) -> tuple[Sequence[torch.Tensor], TreeLayout | None]:
    """(ids [T], positions [T], lengths [B] and rows of logits [R] of a pass on its device, the
    layout of its trees)."""
    if reads_freely(device):
        # Not `torch.tensor`, which takes several times as long.
        numbers = torch.frombuffer(array("q", inputs.ids + inputs.positions), dtype=torch.int64)
        ids, positions = numbers.view(2, -1).unbind()
        lengths = repeated_numbers(tuple(inputs.lengths), device)
        logit_rows = repeated_numbers(tuple(inputs.logit_rows), device)
        return [ids, positions, lengths, logit_rows], inputs.tree
    ids, positions, lengths, logit_rows, *late = inputs.sent(device, *inputs.columns)
    tree = inputs.tree
    if inputs.late is not None:
        inputs.late.write(ids, *late)
        tree = inputs.late.lay_out(positions, *late)
    return [ids, positions, lengths, logit_rows], tree


def place_late(
    rows: Sequence[ScheduledRow],
    drafts: Sequence[Sequence[int]],
    begins: Sequence[int],
    tokens: torch.Tensor,
) -> LateIds:
    """Places in a pass of drafted tokens [B, K] that are on the device alone."""
    width = tokens.shape[1]
    sources: list[int] = []
    places: list[int] = []
    for index, (row, drafted, begin) in enumerate(zip(rows, drafts, begins, strict=True)):
        sources += range(index * width, index * width + len(drafted))
        places += range(begin + row.count, begin + row.count + len(drafted))
    return LateIds(tokens, sources, places)


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
