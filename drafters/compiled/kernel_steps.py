"""Kernel calls of a rewritten forward, and which numbers each of them reads and writes.

What comes before the first kernel is read from tables (`read_rows`) or torch's. Whatever depends on
a kernel must be a kernel's or a view; a forward with any other operation raises `Unlike`.

Legend: T tokens of the pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from draftsmith.drafters.compiled.capture import attend
from draftsmith.drafters.compiled.packed_linear import PackedLinear
from draftsmith.drafters.compiled.patterns import cleared_at_zero, fixed, multiply
from draftsmith.kernels.attention import paged_compiled
from draftsmith.kernels.attention.pool import LayerShape
from draftsmith.kernels.call_list import CallKind
from draftsmith.kernels.products.row_steps import RowSteps, row_steps

Shape = tuple[int | None, ...]  # None: T


class Unlike(Exception):
    """The forward does something that no kernel does."""


class View(NamedTuple):
    """Numbers of a buffer; strides count numbers, and those of dimensions of size 1 nothing."""

    buffer: int
    offset: int
    shape: Shape
    strides: tuple[int, ...]

    @property
    def width(self) -> int:
        """Numbers of a token, which lie side by side; raises `Unlike` where they do not."""
        token = self.shape.index(None)
        apart = self.strides[token + 1 :] != _strides(self.shape)[token + 1 :]
        if apart or any(size != 1 for size in self.shape[:token]):
            raise Unlike("the numbers of a token lie apart")
        return count(self.shape)

    @property
    def stride(self) -> int:
        """From a token to the next."""
        return self.strides[self.shape.index(None)]


class Table(NamedTuple):
    """One of `before.PositionTables`."""

    number: int


class KernelStep(NamedTuple):
    """A call whose buffers have no place yet."""

    kind: CallKind
    function: Any
    places: Sequence[View | Table | PackedLinear | torch.Tensor | None]
    numbers: Sequence[int]
    reals: Sequence[float]


@dataclass
class Buffer:
    width: int  # numbers of a token
    given: Node | None = None  # torch's tensor
    last_used: int = -1  # the number of a step
    place: tuple[int, int] = (0, 0)  # base, bytes of a token


class Layer(NamedTuple):
    number: int
    shape: LayerShape
    group: int  # queries of a token that share a key


def count(shape: Shape) -> int:
    """Numbers of a token."""
    product = 1
    for size in shape:
        product *= 1 if size is None else size
    return product


def _size(view: View, dim: int) -> int:
    """Size of a dimension of heads [1, heads, T, D]."""
    size = view.shape[dim]
    if size is None or len(view.shape) != 4:
        raise Unlike(f"heads of the shape {view.shape}")
    return size


def _strides(shape: Shape) -> tuple[int, ...]:
    """Strides of numbers side by side, the tokens' dimension the first of more than one number."""
    strides, product = [], 1
    for size in reversed(shape):
        strides.append(product)
        product *= 1 if size is None else size
    return tuple(reversed(strides))


def _shape_of(node: Node) -> Shape:
    if "val" not in node.meta:
        raise Unlike(f"{node} was rewritten")
    shape = tuple(fixed(size) for size in node.meta["val"].shape)
    token = shape.index(None) if None in shape else -1
    if shape.count(None) != 1 or any(size != 1 for size in shape[:token]):
        raise Unlike(f"{node} has the shape {tuple(node.meta['val'].shape)}")
    return shape


class KernelSteps:
    """Steps of a rewritten graph. `constants`: values of its last inputs."""

    def __init__(self, graph: Graph, constants: Mapping[Node, Any], dtype: torch.dtype):
        self.graph, self.constants, self.dtype = graph, constants, dtype
        steps, attention = row_steps(dtype), paged_compiled.kernel(dtype)
        if steps is None or attention is None:
            raise Unlike("there are no kernels")
        self.functions, self.attention = steps.functions, attention
        self.steps: list[KernelStep] = []
        self.buffers: list[Buffer] = []
        self.views: dict[Node, View] = {}  # values of kernels, and torch's that they read
        self.numbers: dict[Node, View] = {}
        self.products: dict[Node, tuple[View, list[int]]] = {}
        self.layers: list[Layer] = []
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
            elif (number := cleared_at_zero(node)) is not None:
                self._clear(node, number)
            elif target is torch.cat and self._multiplies_inputs(node):
                self._join(node)
            elif any(self.is_kernels(one) for one in node.all_input_nodes):
                if target not in others:
                    raise Unlike(f"no kernel does {target}")
                others[target](node)

    def _multiplies_inputs(self, joined: Node) -> bool:
        """True for inputs side by side that products alone read."""
        parts = joined.all_input_nodes
        given = all(one.op == "placeholder" and one not in self.constants for one in parts)
        return given and all(user.target is multiply for user in joined.users)

    def is_kernels(self, node: Node) -> bool:
        if node in self.products:
            return True
        return node in self.views and self.buffers[self.views[node].buffer].given is None

    def read_rows(self, tables: Mapping[Node, tuple[Table | torch.Tensor, Node]]) -> None:
        """Read what kernels are given where it lies: rows of a table, by the numbers of an
        input."""
        steps: list[KernelStep] = []
        for node, (table, number) in tables.items():
            view = self._view(node)
            buffer = self.buffers[view.buffer]
            buffer.given, buffer.last_used = None, max(buffer.last_used, 0)
            num_bytes = view.width * self.dtype.itemsize
            steps.append(
                KernelStep(
                    CallKind.ROWS, None, (table, self.number(number), view), (num_bytes,), ()
                )
            )
        for buffer in self.buffers:
            buffer.last_used += len(steps)
        self.steps[:0] = steps

    def number(self, node: Node) -> View:
        """An input of one whole number a token."""
        if node not in self.numbers:
            self.numbers[node] = self._new((None,), given=node)
        return self.numbers[node]

    def _view(self, node: Any) -> View:
        """The numbers that a kernel reads; torch's tensor is given to it side by side."""
        if not isinstance(node, Node) or node in self.constants:
            raise Unlike(f"{node} is no state")
        if node not in self.views:
            shape = _shape_of(node)
            if node.meta["val"].dtype != self.dtype:
                raise Unlike(f"{node} is {node.meta['val'].dtype}")
            self.views[node] = self._new(shape, given=node)
        return self.views[node]

    def _new(self, shape: Shape, given: Node | None = None) -> View:
        self.buffers.append(Buffer(count(shape), given))
        return View(len(self.buffers) - 1, 0, shape, _strides(shape))

    def weight(self, node: Node | None) -> torch.Tensor | None:
        if node is None:
            return None
        weight = self.constants.get(node)
        if weight is None or weight.dtype != self.dtype or not weight.is_contiguous():
            raise Unlike(f"{node} is no weight")
        return weight

    def _do(
        self,
        kind: CallKind,
        function: Any,
        places: Sequence[View | PackedLinear | torch.Tensor | None],
        numbers: Sequence[int],
        reals: Sequence[float] = (),
    ) -> None:
        for view in places:
            if isinstance(view, View):
                self.buffers[view.buffer].last_used = len(self.steps)
        self.steps.append(KernelStep(kind, function, places, numbers, reals))

    def _multiply(self, node: Node) -> None:
        packed, rows = self.constants[node.args[0]], self._view(node.args[1])
        if packed.few is None or rows.stride != rows.width:
            raise Unlike("a product that is torch's")
        out = self._new((*rows.shape[:-1], packed.few.num_outputs))
        self._do(CallKind.MULTIPLY, None, (rows, packed, out), (rows.width, out.width))
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
            CallKind.NORMALISE,
            self.functions["normalise"],
            (read, self.weight(weight), out),
            numbers,
            (eps, share),
        )
        self.views[node] = out

    def _rotate(self, node: Node) -> None:
        x, cosine, sine = map(self._view, node.args)
        heads, dim = _size(x, 1), _size(x, 3)
        if x.strides[3] != 1:
            raise Unlike("the numbers of a head lie apart")
        out = self._new((1, None, heads, dim))
        self._do(
            CallKind.ROTATE,
            self.functions["rotate"],
            (x, cosine, sine, out),
            (heads, dim, x.strides[2], x.strides[1]),
        )
        self.views[node] = _turned(out)

    def _clear(self, node: Node, number: Node) -> None:
        read = self._view(node.args[0])
        out = self._new(read.shape)
        bytes_each = self.dtype.itemsize
        numbers = (bytes_each * read.width, bytes_each * read.stride)
        self._do(CallKind.CLEAR, None, (read, self.number(number), out), numbers)
        self.views[node] = out

    def _gate(self, node: Node) -> None:
        self._pairs(node, CallKind.GATE, "gate")

    def _add(self, node: Node) -> None:
        if node.kwargs or len(node.args) != 2:
            raise Unlike("a sum with a factor")
        self._pairs(node, CallKind.ADD, "add")

    def _pairs(self, node: Node, kind: CallKind, name: str) -> None:
        x, y = map(self._view, node.args)
        if x.shape != y.shape:
            raise Unlike(f"{name} of {x.shape} and {y.shape}")
        out, (width,) = self._new(x.shape), {x.width, y.width}
        self._do(kind, self.functions[name], (x, y, out), (width, x.stride, y.stride))
        self.views[node] = out

    def _join(self, node: Node) -> None:
        parts = [self._view(part) for part in node.args[0]]
        if node.args[1:] not in ((-1,), (len(parts[0].shape) - 1,)):
            raise Unlike("tokens put together")
        out, begin = self._new(_shape_of(node)), 0
        if out.width != sum(part.width for part in parts) or any(
            count(part.shape) != part.shape[-1] for part in parts
        ):
            raise Unlike("parts of several rows")
        bytes_each = self.dtype.itemsize
        for part in parts:
            to = out._replace(offset=begin)
            numbers = [bytes_each * count for count in (part.width, part.stride, out.stride)]
            self._do(CallKind.COPY, None, (part, to), numbers)
            begin += part.width
        self.views[node] = out

    def _attend(self, node: Node) -> None:
        _, query, key, value, layer, scaling, window, chunked, softcap, sinks = node.args
        q, k, v = map(self._view, (query, key, value))
        heads, key_dim = _size(q, 1), _size(q, 3)
        kv_heads, value_dim = _size(v, 1), _size(v, 3)
        plain = (
            softcap is None and sinks is None and max(key_dim, value_dim) <= paged_compiled.MOST_DIM
        )
        if not plain or any(view.strides[3] != 1 for view in (q, k, v)):
            raise Unlike("an attention that is torch's")
        out = self._new((1, None, heads, value_dim))
        strides = [view.strides[dim] for view in (q, k, v) for dim in (1, 2)]
        seen = 2 * (window or 0) + int(bool(window and chunked))
        numbers = (layer, heads, kv_heads, key_dim, value_dim, *strides, seen)
        self._do(CallKind.ATTEND, self.attention, (q, k, v, out), numbers, (scaling,))
        self.views[node] = out
        self.layers.append(
            Layer(layer, LayerShape(kv_heads, key_dim, value_dim), heads // kv_heads)
        )

    def _reshape(self, node: Node) -> None:
        read, shape = self._view(node.args[0]), _shape_of(node)
        if read.width != count(shape) or shape.index(None) != read.shape.index(None):
            raise Unlike(f"{node} mixes tokens")
        strides = list(_strides(shape))
        strides[shape.index(None)] = read.stride
        self.views[node] = read._replace(shape=shape, strides=tuple(strides))

    def _transpose(self, node: Node) -> None:
        if node.args[1:] not in ((1, 2), (2, 1)):
            raise Unlike("another transposition")
        self.views[node] = _turned(self._view(node.args[0]))


def _turned(view: View) -> View:
    """With its dimensions 1 and 2 exchanged."""
    shape, strides = list(view.shape), list(view.strides)
    shape[1], shape[2] = shape[2], shape[1]
    strides[1], strides[2] = strides[2], strides[1]
    return view._replace(shape=tuple(shape), strides=tuple(strides))
