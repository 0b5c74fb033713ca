"""A rewritten forward as a list of kernel calls, made by one call for a pass of a few tokens.

Legend: T tokens of the pass.

What comes before the first kernel is torch's, but for what positions alone decide, which is kept in
tables.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from draftsmith.drafters.compiled.kernel_steps import (
    TOKENS,
    Buffer,
    KernelStep,
    KernelSteps,
    Table,
    Unlike,
)
from draftsmith.drafters.compiled.packed_linear import PackedLinear
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.kernels.attention import paged_compiled
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.paged_compiled import CompiledContext
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.call_list import (
    ArgumentPlace,
    CallKind,
    CallList,
    KernelCall,
    RowAddresses,
    call_list,
)
from draftsmith.kernels.host_compiler import address_of
from draftsmith.kernels.products.few_rows import MOST_ROWS

log = logging.getLogger(__name__)
_SCRATCH, _STATES, _GIVEN = 1, 2, 3  # bases of places; `_GIVEN` and on: torch's tensors
_LINE_BYTES = 64
_address = torch.Tensor.data_ptr


class _Outputs(Sequence[torch.Tensor]):
    """Outputs of a pass; each is cut out of `states` once it is asked for, as most passes need
    one. A place: 0 for the kernels' states and 1 for torch's outputs, and a number among them."""

    def __init__(
        self, places: Sequence[tuple[int, int]], states: torch.Tensor, others: list[torch.Tensor]
    ):
        self._places, self._parts = places, (states, others)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        part, number = self._places[index]
        return self._parts[part][number]


class OneCall:
    """A forward of a few tokens over a paged pool; made by `one_call`. The weights stay the
    caller's, kept alive there; `refresh` says that packed ones were laid out again."""

    def __init__(self, graph: Graph, lowered: KernelSteps, constants: Mapping[Node, Any]):
        self._lowered, self._constants = lowered, list(constants.values())
        self.dtype = lowered.dtype
        if not lowered.layers:
            raise Unlike("no attention: as fast from Python")
        self.most_group = max(layer.group for layer in lowered.layers)
        self._tables = _read_rows(graph, lowered, constants)
        outputs, self.states = _place_outputs(lowered)
        self.scratch_bytes = _place_others(lowered)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        # What kernels are given: an input of the graph by its number, else torch's.
        self.given: list[int | None] = []
        wanted = []
        for buffer in lowered.buffers:
            if buffer.given is None:
                continue
            buffer.place = (_GIVEN + len(self.given), 0)
            is_input = buffer.given.op == "placeholder"
            self.given.append(inputs.index(buffer.given) if is_input else None)
            wanted += [] if is_input else [buffer.given]
        self._num_wanted = len(wanted)
        # Outputs that are torch's come after what kernels read.
        others = [node for node in outputs if isinstance(node, Node)]
        wanted += others
        self.outputs = [
            (1, others.index(one)) if isinstance(one, Node) else (0, one) for one in outputs
        ]
        self._by_torch = part_of(graph, wanted) if wanted else None
        self._known: tuple[weakref.ref[PagedPool], torch.Tensor | None] | None = None
        self._lock = threading.Lock()  # of tables and list, which change together
        self._list_calls()

    def refresh(self) -> None:
        with self._lock:
            self._list_calls()

    def reach(self, position: int) -> None:
        """Make the tables long enough, with a new list; nothing where they are."""
        if self._tables is None:
            return
        with self._lock:
            if self._tables.reach(position):
                self._list_calls()

    def _list_calls(self) -> None:
        # Another thread may be in a call of the list before, whose tables and laid out weights must
        # live until it ends: each list holds its own.
        held: list[Any] = []
        tables = [] if self._tables is None else self._tables.tables
        calls = [_call(self._lowered, step, tables, held) for step in self._lowered.steps]
        found = call_list(calls, held)
        if found is None:
            raise Unlike("there is no compiler")
        self.calls: CallList = found

    def __call__(
        self, inputs: Sequence[torch.Tensor], context: AttentionContext | None
    ) -> Sequence[torch.Tensor] | None:
        """The forward's outputs; None for a pass that the kernels do not take: more tokens, another
        context or pool. Raises `IndexError` for an id outside the vocabulary."""
        tokens = inputs[0].shape[1]
        rows = self._rows(context) if 0 < tokens <= MOST_ROWS else None
        layers = None if rows is None else self.layers(context.pool)  # type: ignore[union-attr]
        if rows is None or layers is None:
            return None
        found: Sequence[torch.Tensor] = ()
        if self._by_torch is not None:
            found = self._by_torch(*inputs, context, *self._constants)
        by_torch = iter(found)
        given = [
            (next(by_torch) if number is None else inputs[number]).contiguous()
            for number in self.given
        ]
        scratch = torch.empty(self.scratch_bytes * tokens, dtype=torch.uint8)
        shape = [tokens if size == TOKENS else size for size in self.states]
        states = torch.empty(shape, dtype=self.dtype)
        bases = [0, *map(_address, (scratch, states, *given))]
        calls = self.calls
        if not calls(bases, tokens, rows, layers):
            if self._tables is not None:
                self.reach(int(inputs[self._tables.input].max()))
            # Another thread may have made it.
            if self.calls is calls or not self.calls(bases, tokens, rows, layers):
                raise IndexError("a token id of the pass is outside the vocabulary")
        return _Outputs(self.outputs, states, list(found[self._num_wanted :]))

    def _rows(self, context: AttentionContext | None) -> RowAddresses | None:
        if type(context) is not PagedPass or not isinstance(context.context, CompiledContext):
            return None
        rows = context.context.row_addresses
        return rows if rows.longest_row * self.most_group <= paged_compiled.MOST_QUERIES else None

    def layers(self, pool: PagedPool) -> torch.Tensor | None:
        """[L, 2] int64, addresses of keys and values; None where the pool has others than the
        layers."""
        if self._known is None or self._known[0]() is not pool:
            # Both at once: another thread may pass by.
            self._known = (weakref.ref(pool), self._addresses(pool))
        return self._known[1]

    def _addresses(self, pool: PagedPool) -> torch.Tensor | None:
        for index, (heads, key_dim, value_dim), _ in self._lowered.layers:
            if index >= len(pool.keys):
                return None
            for states, dim in ((pool.keys[index], key_dim), (pool.values[index], value_dim)):
                if states.shape[1:] != (heads, dim) or states.dtype != self.dtype:
                    return None
                if not states.is_contiguous():
                    return None
        pairs = zip(pool.keys, pool.values)
        return torch.tensor([[keys.data_ptr(), values.data_ptr()] for keys, values in pairs])


def _read_rows(
    graph: Graph, lowered: KernelSteps, constants: Mapping[Node, Any]
) -> PositionTables | None:
    """Have what kernels are given read from tables, where it is in one or positions decide it."""
    wanted = [buffer.given for buffer in lowered.buffers if buffer.given is not None]
    wanted += [node for node in lowered.outputs if node.target is torch.embedding]
    rows: dict[Node, tuple[Table | torch.Tensor, Node]] = {}
    decided: dict[Node, list[Node]] = {}
    for node in dict.fromkeys(wanted):
        if node.target is torch.embedding:
            table, ids = node.args[:2]
            weight = lowered.weight(table)
            if ids.op == "placeholder" and ids.meta["val"].dtype == torch.int64:
                rows[node] = (weight, ids)
        elif (number := deciding(node, constants)) is not None:
            decided.setdefault(number, []).append(node)
    # Nearly always all of them; the others are torch's.
    number, nodes = max(decided.items(), key=lambda item: len(item[1]), default=(None, []))
    tables = None
    if number is not None:
        tables = PositionTables(graph, nodes, number, list(constants.values()))
        if not tables.by_token:
            raise Unlike("positions that decide on each other")
        rows |= {node: (Table(index), number) for index, node in enumerate(nodes)}
    lowered.read_rows(rows)
    return tables


def _place_outputs(lowered: KernelSteps) -> tuple[list[Node | int], list[int]]:
    """Torch's outputs, and numbers of the kernels'; the shape of all of these together."""
    outputs: list[Node | int] = []
    buffers: list[Buffer] = []
    shapes = set()
    for node in lowered.outputs:
        if not lowered.is_kernels(node):
            outputs.append(node)
            continue
        view = lowered.views[node]
        buffer = lowered.buffer_of(view)
        assert buffer is not None
        if not view.is_contiguous() or view.numel() != buffer.numbers.numel():
            raise Unlike("an output that is part of something")
        if buffer not in buffers:
            buffer.place = (_STATES, len(buffers) * buffer.token_bytes)
            buffers.append(buffer)
        outputs.append(buffers.index(buffer))
        shapes.add(view.shape)
    if len(shapes) != 1:
        raise Unlike("outputs of several shapes")
    return outputs, [len(buffers), *shapes.pop()]


def _place_others(lowered: KernelSteps) -> int:
    """Places of what only the kernels see; memory is used again after a buffer's last step.
    Returns the bytes that a token takes."""
    live: list[tuple[int, int, int]] = []  # begin, end, last step; by begin
    most = 0
    for number, step in enumerate(lowered.steps):
        live = [one for one in live if one[2] >= number]
        for buffer in map(lowered.buffer_of, step.places):
            if buffer is None or buffer.given is not None or buffer.place[0]:
                continue
            lines = -(-buffer.token_bytes // _LINE_BYTES)
            begin = 0
            for other, end, _ in live:
                if begin + lines * _LINE_BYTES <= other:
                    break
                begin = end
            buffer.place = (_SCRATCH, begin)
            end = begin + lines * _LINE_BYTES
            live = sorted([*live, (begin, end, buffer.last_used)])
            most = max(most, end)
    return most


def _call(
    lowered: KernelSteps, step: KernelStep, tables: Sequence[torch.Tensor], held: list[Any]
) -> KernelCall:
    """Adds what the call's addresses lie in to `held`."""
    places: list[ArgumentPlace] = []
    function, numbers = step.function, list(step.numbers)
    for value in step.places:
        buffer = lowered.buffer_of(value)
        if isinstance(value, torch.Tensor) and buffer is not None:
            offset = value.storage_offset() * value.itemsize
            places.append(ArgumentPlace(*buffer.place, offset))
        elif isinstance(value, PackedLinear):
            product = value.few
            assert product is not None
            function = product.function
            places += [ArgumentPlace(0, 0, address or 0) for address in product.pointers]
            numbers.append(product.readings)
            held.append(product)
        else:
            value = tables[value.number] if isinstance(value, Table) else value
            places.append(ArgumentPlace(0, 0, address_of(value) or 0))
            held.append(value)
            numbers += [] if value is None or step.kind is not CallKind.ROWS else [len(value)]
    return KernelCall.of(step.kind, function, places, numbers, step.reals)


def one_call(graph: Graph, constants: Mapping[Node, Any]) -> OneCall | None:
    """`graph` is rewritten and `constants` are the values of its last inputs. None where a forward
    holds anything but kernels and views behind its first kernel."""
    dtypes = {one.dtype for one in constants.values() if isinstance(one, PackedLinear)}
    try:
        if len(dtypes) > 1:
            raise Unlike("weights of several types")
        dtype = dtypes.pop() if dtypes else _dtype_of(graph)
        return OneCall(graph, KernelSteps(graph, constants, dtype), constants)
    except Unlike as reason:
        log.debug("a forward is not one call: %s", reason)
        return None


def _dtype_of(graph: Graph) -> torch.dtype:
    """Type of the outputs."""
    (outputs,) = next(node for node in graph.nodes if node.op == "output").args
    first = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
    if not isinstance(first, Node) or "val" not in first.meta:
        raise Unlike("outputs of no known type")
    return first.meta["val"].dtype


_FIRST_ROWS = 256  # of a table of positions
_TOLERANCE = 1e-2  # of a cosine; a forward that mixes positions is further off


class PositionTables:
    """Values that one input of a graph, whole numbers, decides token by token: a row of each for
    every number from 0 on.

    Args:
        nodes: those that depend on no other input; see `deciding`.
        constants: values of the graph's last inputs.
    """

    def __init__(self, graph: Graph, nodes: Sequence[Node], number: Node, constants: Sequence[Any]):
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._part, self._constants = part_of(graph, nodes), constants
        self.input = inputs.index(number)  # of the graph, by its number
        self._after = len(inputs) - self.input - 1 - len(constants)
        self._dims = number.meta["val"].ndim
        self.tables: list[torch.Tensor] = []
        self.make(_FIRST_ROWS)

    @property
    def by_token(self) -> bool:
        """True where a token's rows do not depend on the other tokens."""
        chosen = torch.tensor([3, 1, 4])
        pairs = zip(self._values(chosen), self.tables)
        return all(torch.allclose(one, rows[chosen], atol=_TOLERANCE) for one, rows in pairs)

    def make(self, num_rows: int) -> None:
        self.tables = self._values(torch.arange(num_rows))

    def reach(self, number: int) -> bool:
        """Make the tables longer where they have no row `number`; False where there is nothing to
        be made."""
        num_rows = len(self.tables[0]) if self.tables else number + 1
        if not 0 <= num_rows <= number:
            return False
        self.make(max(2 * num_rows, number + 1))
        return True

    @torch.no_grad()
    def _values(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        given = numbers.view(*[1] * (self._dims - 1), -1)
        nothing = (None,) * self.input, (None,) * self._after
        found = self._part(*nothing[0], given, *nothing[1], *self._constants)
        return [value.reshape(len(numbers), -1).contiguous() for value in found]


def _needed(wanted: Sequence[Node]) -> set[Node]:
    """The nodes and all that they are made of."""
    needed: set[Node] = set()
    open_nodes = list(wanted)
    while open_nodes:
        node = open_nodes.pop()
        if node not in needed:
            needed.add(node)
            open_nodes += node.all_input_nodes
    return needed


def deciding(node: Node, constants: Collection[Node]) -> Node | None:
    """The only input that the node depends on, whole numbers; None for several, and for a row of a
    table, of which there is one already."""
    needed = _needed([node])
    if any(one.target is torch.embedding for one in needed):
        return None
    inputs = [one for one in needed if one.op == "placeholder" and one not in constants]
    if len(inputs) != 1 or inputs[0] is node or inputs[0].meta["val"].dtype != torch.int64:
        return None
    return inputs[0]


def part_of(graph: Graph, wanted: Sequence[Node]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The part of the graph that gives `wanted`, with the same inputs."""
    needed = _needed(wanted)
    part = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in wanted))
    return GraphModule({}, part).forward
