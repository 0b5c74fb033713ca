"""A rewritten forward as a list of kernel calls, made by one call for a pass of a few tokens.

What comes before the layers (embedding, rotary angles) stays torch's. Whatever depends on a kernel
must be a kernel's or a view; a forward with any other operation is replayed as it is.

Legend: T tokens of the pass.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from draftsmith.drafters.compiled.capture import attend
from draftsmith.drafters.compiled.packed_linear import PackedLinear
from draftsmith.drafters.compiled.rewrite import fixed, multiply
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.kernels.attention import paged_compiled
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.paged_compiled import CompiledContext
from draftsmith.kernels.attention.pool import LayerShape, PagedPool
from draftsmith.kernels.call_list import Call, CallList, Kind, Place, RowAddresses, at, call_list
from draftsmith.kernels.few_rows import MOST_ROWS
from draftsmith.kernels.row_steps import RowSteps, row_steps

log = logging.getLogger(__name__)
_SCRATCH, _STATES, _GIVEN = 1, 2, 3  # bases of places; `_GIVEN` and on: torch's tensors
_LINE_BYTES = 64
# Less is not worth a list: a head is one product, which is one call as it is.
_LEAST_CALLS = 3
Shape = tuple[int | None, ...]  # None: T


class _Unlike(Exception):
    """The forward does something that no kernel does."""


class _View(NamedTuple):
    """Numbers of a buffer; strides count numbers, and those of dimensions of size 1 nothing."""

    buffer: int
    offset: int
    shape: Shape
    strides: tuple[int, ...]

    @property
    def width(self) -> int:
        """Numbers of a token, which lie side by side; raises `_Unlike` where they do not."""
        token = self.shape.index(None)
        apart = self.strides[token + 1 :] != _strides(self.shape)[token + 1 :]
        if apart or any(size != 1 for size in self.shape[:token]):
            raise _Unlike("the numbers of a token lie apart")
        return _count(self.shape)

    @property
    def stride(self) -> int:
        """From a token to the next."""
        return self.strides[self.shape.index(None)]


class _Step(NamedTuple):
    """A call whose buffers have no place yet."""

    kind: Kind
    function: Any
    places: Sequence[_View | PackedLinear | torch.Tensor | None]
    numbers: Sequence[int]
    reals: Sequence[float]


@dataclass
class _Buffer:
    width: int  # numbers of a token
    given: Node | None = None  # torch's tensor
    last_used: int = -1  # the number of a step
    place: tuple[int, int] = (0, 0)  # base, bytes of a token


class _Layer(NamedTuple):
    index: int
    shape: LayerShape
    group: int  # queries of a token that share a key


def _count(shape: Shape) -> int:
    """Numbers of a token."""
    product = 1
    for size in shape:
        product *= 1 if size is None else size
    return product


def _strides(shape: Shape) -> tuple[int, ...]:
    """Strides of numbers side by side, the tokens' dimension the first of more than one number."""
    strides, product = [], 1
    for size in reversed(shape):
        strides.append(product)
        product *= 1 if size is None else size
    return tuple(reversed(strides))


def _shape_of(node: Node) -> Shape:
    if "val" not in node.meta:
        raise _Unlike(f"{node} was rewritten")
    shape = tuple(fixed(size) for size in node.meta["val"].shape)
    token = shape.index(None) if None in shape else -1
    if shape.count(None) != 1 or any(size != 1 for size in shape[:token]):
        raise _Unlike(f"{node} has the shape {tuple(node.meta['val'].shape)}")
    return shape


class _Lowering:
    """Steps of a rewritten graph. `constants`: values of its last inputs."""

    def __init__(self, graph: Graph, constants: Mapping[Node, Any], dtype: torch.dtype):
        self.graph, self.constants, self.dtype = graph, constants, dtype
        steps, attention = row_steps(dtype), paged_compiled.kernel(dtype)
        if steps is None or attention is None:
            raise _Unlike("there are no kernels")
        self.functions, self.attention = steps.functions, attention
        self.steps: list[_Step] = []
        self.buffers: list[_Buffer] = []
        self.views: dict[Node, _View] = {}  # values of kernels, and torch's that they read
        self.products: dict[Node, tuple[_View, list[int]]] = {}
        self.layers: list[_Layer] = []
        kernels: dict[Any, Callable[[Node], None]] = {
            multiply: self._multiply,
            RowSteps.normalise: self._normalise,
            RowSteps.rotate: self._rotate,
            RowSteps.gate: self._gate,
            attend: self._attend,
        }
        others: dict[Any, Callable[[Node], None]] = {
            torch.add: self._add,
            torch.cat: self._join,
            operator.getitem: self._item,
            torch.Tensor.view: self._reshape,
            torch.reshape: self._reshape,
            torch.transpose: self._transpose,
        }
        self.outputs: list[Node] = []
        for node in graph.nodes:
            # A method of an object is another object each time.
            target = getattr(node.target, "__func__", node.target)
            if node.op == "output":
                found = node.args[0]
                self.outputs = list(found) if isinstance(found, (list, tuple)) else [found]
            elif target in kernels:
                kernels[target](node)
            elif any(self.is_kernels(one) for one in node.all_input_nodes):
                if target not in others:
                    raise _Unlike(f"no kernel does {target}")
                others[target](node)

    def is_kernels(self, node: Node) -> bool:
        if node in self.products:
            return True
        return node in self.views and self.buffers[self.views[node].buffer].given is None

    def _view(self, node: Any) -> _View:
        """The numbers that a kernel reads; torch's tensor is given to it side by side."""
        if not isinstance(node, Node) or node in self.constants:
            raise _Unlike(f"{node} is no state")
        if node not in self.views:
            shape = _shape_of(node)
            if node.meta["val"].dtype != self.dtype:
                raise _Unlike(f"{node} is {node.meta['val'].dtype}")
            self.views[node] = self._new(shape, given=node)
        return self.views[node]

    def _new(self, shape: Shape, given: Node | None = None) -> _View:
        self.buffers.append(_Buffer(_count(shape), given))
        return _View(len(self.buffers) - 1, 0, shape, _strides(shape))

    def _weight(self, node: Node | None) -> torch.Tensor | None:
        if node is None:
            return None
        weight = self.constants.get(node)
        if weight is None or weight.dtype != self.dtype or not weight.is_contiguous():
            raise _Unlike(f"{node} is no weight")
        return weight

    def _do(
        self,
        kind: Kind,
        function: Any,
        places: Sequence[_View | PackedLinear | torch.Tensor | None],
        numbers: Sequence[int],
        reals: Sequence[float] = (),
    ) -> None:
        for view in places:
            if isinstance(view, _View):
                self.buffers[view.buffer].last_used = len(self.steps)
        self.steps.append(_Step(kind, function, places, numbers, reals))

    def _multiply(self, node: Node) -> None:
        packed, rows = self.constants[node.args[0]], self._view(node.args[1])
        if packed.few is None or rows.stride != rows.width:
            raise _Unlike("a product that is oneDNN's")
        out = self._new((*rows.shape[:-1], sum(packed.sizes)))
        self._do(Kind.MULTIPLY, None, (rows, packed, out), (rows.width, out.width))
        self.products[node] = (out, packed.sizes)

    def _item(self, node: Node) -> None:
        whole, sizes = self.products[node.args[0]]
        index = node.args[1]
        self.views[node] = whole._replace(
            offset=sum(sizes[:index]), shape=(*whole.shape[:-1], sizes[index])
        )

    def _normalise(self, node: Node) -> None:
        x, weight, eps, share = node.args
        read, width = self._view(x), fixed(x.meta["val"].shape[-1])
        assert width is not None
        out = self._new(read.shape)
        numbers = (read.width // width, width, read.stride, self.dtype.itemsize)
        self._do(
            Kind.NORMALISE,
            self.functions["normalise"],
            (read, self._weight(weight), out),
            numbers,
            (eps, share),
        )
        self.views[node] = out

    def _rotate(self, node: Node) -> None:
        x, cosine, sine = map(self._view, node.args)
        _, heads, tokens, dim = x.shape
        if x.strides[3] != 1 or tokens is not None or heads is None:
            raise _Unlike("the numbers of a head lie apart")
        out = self._new((1, None, heads, dim))
        self._do(
            Kind.ROTATE,
            self.functions["rotate"],
            (x, cosine, sine, out),
            (heads, dim, x.strides[2], x.strides[1]),
        )
        self.views[node] = _turned(out)

    def _gate(self, node: Node) -> None:
        self._pairs(node, Kind.GATE, "gate")

    def _add(self, node: Node) -> None:
        if node.kwargs or len(node.args) != 2:
            raise _Unlike("a sum with a factor")
        self._pairs(node, Kind.ADD, "add")

    def _pairs(self, node: Node, kind: Kind, name: str) -> None:
        x, y = map(self._view, node.args)
        if x.shape != y.shape:
            raise _Unlike(f"{name} of {x.shape} and {y.shape}")
        out, (width,) = self._new(x.shape), {x.width, y.width}
        self._do(kind, self.functions[name], (x, y, out), (width, x.stride, y.stride))
        self.views[node] = out

    def _join(self, node: Node) -> None:
        parts = [self._view(part) for part in node.args[0]]
        if node.args[1:] not in ((-1,), (len(parts[0].shape) - 1,)):
            raise _Unlike("tokens put together")
        out, begin = self._new(_shape_of(node)), 0
        if out.width != sum(part.width for part in parts) or any(
            _count(part.shape) != part.shape[-1] for part in parts
        ):
            raise _Unlike("parts of several rows")
        bytes_each = self.dtype.itemsize
        for part in parts:
            to = out._replace(offset=begin)
            numbers = [bytes_each * count for count in (part.width, part.stride, out.stride)]
            self._do(Kind.COPY, None, (part, to), numbers)
            begin += part.width
        self.views[node] = out

    def _attend(self, node: Node) -> None:
        _, query, key, value, layer, scaling, window, chunked, softcap, sinks = node.args
        q, k, v = map(self._view, (query, key, value))
        _, heads, _, key_dim = q.shape
        _, kv_heads, _, value_dim = v.shape
        assert None not in (heads, kv_heads, key_dim, value_dim)
        plain = softcap is None and sinks is None and max(key_dim, value_dim) <= 256
        if not plain or any(view.strides[3] != 1 for view in (q, k, v)):
            raise _Unlike("an attention that is torch's")
        out = self._new((1, None, heads, value_dim))
        strides = [view.strides[dim] for view in (q, k, v) for dim in (1, 2)]
        seen = 2 * (window or 0) + int(bool(window and chunked))
        numbers = (layer, heads, kv_heads, key_dim, value_dim, *strides, seen)
        self._do(Kind.ATTEND, self.attention, (q, k, v, out), numbers, (scaling,))
        self.views[node] = out
        self.layers.append(
            _Layer(layer, LayerShape(kv_heads, key_dim, value_dim), heads // kv_heads)
        )

    def _reshape(self, node: Node) -> None:
        read, shape = self._view(node.args[0]), _shape_of(node)
        if read.width != _count(shape) or shape.index(None) != read.shape.index(None):
            raise _Unlike(f"{node} mixes tokens")
        strides = list(_strides(shape))
        strides[shape.index(None)] = read.stride
        self.views[node] = read._replace(shape=shape, strides=tuple(strides))

    def _transpose(self, node: Node) -> None:
        if node.args[1:] not in ((1, 2), (2, 1)):
            raise _Unlike("another transposition")
        self.views[node] = _turned(self._view(node.args[0]))


def _turned(view: _View) -> _View:
    """With its dimensions 1 and 2 exchanged."""
    shape, strides = list(view.shape), list(view.strides)
    shape[1], shape[2] = shape[2], shape[1]
    strides[1], strides[2] = strides[2], strides[1]
    return view._replace(shape=tuple(shape), strides=tuple(strides))


class OneCall:
    """A forward of a few tokens over a paged pool; made by `one_call`. The weights stay the
    caller's, kept alive there; `refresh` says that packed ones were laid out again."""

    def __init__(self, graph: Graph, lowered: _Lowering):
        self._lowered, self._dtype = lowered, lowered.dtype
        self._most_group = max(layer.group for layer in lowered.layers)
        self._outputs, self._states = _place_outputs(lowered)
        self._scratch_bytes = _place_others(lowered)
        given = [buffer for buffer in lowered.buffers if buffer.given is not None]
        for index, buffer in enumerate(given):
            buffer.place = (_GIVEN + index, 0)
        wanted = [buffer.given for buffer in given]
        # Outputs that are torch's come after what kernels read.
        wanted += [node for node in self._outputs if isinstance(node, Node)]
        self._num_given, self._before = len(given), _before(graph, wanted)
        self._known: tuple[weakref.ref[PagedPool], torch.Tensor | None] | None = None
        self.refresh()

    def refresh(self) -> None:
        calls = [_call(self._lowered, step) for step in self._lowered.steps]
        found = call_list(calls)
        if found is None:
            raise _Unlike("there is no compiler")
        self._calls: CallList = found

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        context: AttentionContext | None,
        constants: Sequence[Any],
    ) -> list[torch.Tensor] | None:
        """The forward's outputs; None for a pass that the kernels do not take: more tokens, a
        tree, another context or pool."""
        tokens = inputs[0].shape[1]
        rows = self._rows(context) if 0 < tokens <= MOST_ROWS else None
        layers = None if rows is None else self._layers(context.pool)  # type: ignore[union-attr]
        if rows is None or layers is None:
            return None
        found = self._before(*inputs, context, *constants)
        given = [tensor.contiguous() for tensor in found[: self._num_given]]
        scratch = torch.empty(self._scratch_bytes * tokens, dtype=torch.uint8)
        states = torch.empty(self._states[0], *self._sized(tokens), dtype=self._dtype)
        addresses = [tensor.data_ptr() for tensor in (scratch, states, *given)]
        self._calls([0, *addresses], tokens, rows, layers)
        own, others = states.unbind(0), iter(found[self._num_given :])
        return [next(others) if isinstance(at, Node) else own[at] for at in self._outputs]

    def _sized(self, tokens: int) -> list[int]:
        return [tokens if size is None else size for size in self._states[1]]

    def _rows(self, context: AttentionContext | None) -> RowAddresses | None:
        if type(context) is not PagedPass or not isinstance(context.context, CompiledContext):
            return None
        rows = context.context.row_addresses
        if rows is None or rows.longest_row * self._most_group > paged_compiled.MOST_QUERIES:
            return None
        return rows

    def _layers(self, pool: PagedPool) -> torch.Tensor | None:
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
                if states.shape[1:] != (heads, dim) or states.dtype != self._dtype:
                    return None
                if not states.is_contiguous():
                    return None
        pairs = zip(pool.keys, pool.values)
        return torch.tensor([[keys.data_ptr(), values.data_ptr()] for keys, values in pairs])


def _place_outputs(lowered: _Lowering) -> tuple[list[Node | int], tuple[int, Shape]]:
    """Torch's outputs, and numbers of the kernels'; how many these are and the shape of each."""
    outputs: list[Node | int] = []
    buffers: list[int] = []
    shapes = set()
    for node in lowered.outputs:
        if not lowered.is_kernels(node):
            outputs.append(node)
            continue
        view = lowered.views[node]
        buffer = lowered.buffers[view.buffer]
        if view.width != buffer.width or view.stride != buffer.width:
            raise _Unlike("an output that is part of something")
        if view.buffer not in buffers:
            num_bytes = len(buffers) * buffer.width * lowered.dtype.itemsize
            buffer.place = (_STATES, num_bytes)
            buffers.append(view.buffer)
        outputs.append(buffers.index(view.buffer))
        shapes.add(view.shape)
    if len(shapes) != 1:
        raise _Unlike("outputs of several shapes")
    return outputs, (len(buffers), shapes.pop())


def _place_others(lowered: _Lowering) -> int:
    """Places of what only the kernels see; memory is used again after a buffer's last step.
    Returns the bytes that a token takes."""
    live: list[tuple[int, int, int]] = []  # begin, end, last step; by begin
    most = 0
    for number, step in enumerate(lowered.steps):
        live = [one for one in live if one[2] >= number]
        for view in step.places:
            if not isinstance(view, _View):
                continue
            buffer = lowered.buffers[view.buffer]
            if buffer.given is not None or buffer.place[0]:
                continue
            lines = -(-buffer.width * lowered.dtype.itemsize // _LINE_BYTES)
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


def _before(graph: Graph, wanted: Sequence[Node]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The part of the graph that gives `wanted`, with the same inputs."""
    needed: set[Node] = set()
    open_nodes = list(wanted)
    while open_nodes:
        node = open_nodes.pop()
        if node not in needed:
            needed.add(node)
            open_nodes += node.all_input_nodes
    before, copies = Graph(), {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = before.node_copy(node, copies.__getitem__)
    before.output(tuple(copies[node] for node in wanted))
    return GraphModule({}, before).forward


def _call(lowered: _Lowering, step: _Step) -> Call:
    places: list[Place] = []
    function = step.function
    for value in step.places:
        if isinstance(value, _View):
            base, per_token = lowered.buffers[value.buffer].place
            places.append(Place(base, per_token, value.offset * lowered.dtype.itemsize))
        elif isinstance(value, PackedLinear):
            assert value.few is not None
            function = value.few.function
            places += map(at, value.few.pointers)
        else:
            places.append(at(None if value is None else value.data_ptr()))
    return Call(step.kind, function, places, step.numbers, step.reals)


def one_call(graph: Graph, constants: Mapping[Node, Any]) -> OneCall | None:
    """`graph` is rewritten and `constants` are the values of its last inputs. None where a forward
    holds anything but kernels and views behind its first kernel, or hardly any of them."""
    dtypes = {
        packed.weights[0].dtype for packed in constants.values() if isinstance(packed, PackedLinear)
    }
    try:
        if len(dtypes) != 1:
            raise _Unlike("weights of several types")
        lowered = _Lowering(graph, constants, dtypes.pop())
        if len(lowered.steps) < _LEAST_CALLS or not lowered.layers:
            raise _Unlike("hardly any kernels")
        return OneCall(graph, lowered)
    except _Unlike as reason:
        log.debug("a forward is not one call: %s", reason)
        return None
