"""Kernel calls of a rewritten forward, and which numbers each of them reads and writes.

What comes before the first kernel is read from tables (`read_rows`) or torch's. Whatever depends on
a kernel must be a kernel's or a view; a forward with any other operation raises `Unlike`.

Legend: T tokens of the pass. Numbers are looked at as tensors without memory, of `TOKENS` tokens:
what is a view of what, offsets and strides are torch's to say.
"""

from __future__ import annotations

import math
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

TOKENS = 1_000_003  # that no other dimension has


class Unlike(Exception):
    """The forward does something that no kernel does."""


class Table(NamedTuple):
    """One of `one_call.PositionTables`."""

    number: int


class KernelStep(NamedTuple):
    """A call whose buffers have no place yet."""

    kind: CallKind
    function: Any
    places: Sequence[torch.Tensor | Table | PackedLinear | None]
    numbers: Sequence[int]
    reals: Sequence[float]


@dataclass(eq=False)
class Buffer:
    numbers: torch.Tensor  # all of it
    given: Node | None = None  # torch's tensor
    last_used: int = -1  # the number of a step
    place: tuple[int, int] = (0, 0)  # base, bytes of a token

    @property
    def token_bytes(self) -> int:
        return width_of(self.numbers) * self.numbers.itemsize


class Layer(NamedTuple):
    number: int
    shape: LayerShape
    group: int  # queries of a token that share a key


def shape_of(node: Node) -> list[int]:
    if "val" not in node.meta:
        raise Unlike(f"{node} was rewritten")
    sizes = [fixed(size) for size in node.meta["val"].shape]
    token = sizes.index(None) if None in sizes else -1
    if sizes.count(None) != 1 or any(size != 1 for size in sizes[:token]):
        raise Unlike(f"{node} has the shape {tuple(node.meta['val'].shape)}")
    return [TOKENS if size is None else size for size in sizes]


def stride_of(view: torch.Tensor) -> int:
    """From a token to the next."""
    return view.stride(view.shape.index(TOKENS))


def width_of(view: torch.Tensor) -> int:
    """Numbers of a token, which lie side by side; raises `Unlike` where they do not."""
    token = view.shape.index(TOKENS)
    if math.prod(view.shape[:token]) != 1 or not view.select(token, 0).is_contiguous():
        raise Unlike("the numbers of a token lie apart")
    return view.numel() // TOKENS


def _heads_of(view: torch.Tensor) -> tuple[int, int]:
    """Number and size of heads [1, heads, T, D], whose numbers lie side by side."""
    if view.ndim != 4 or view.shape[2] != TOKENS or view.stride(3) != 1:
        raise Unlike(f"heads of the shape {tuple(view.shape)}")
    return view.shape[1], view.shape[3]


class KernelSteps:
    """Steps of a rewritten graph. `constants`: values of its last inputs."""

    def __init__(self, graph: Graph, constants: Mapping[Node, Any], dtype: torch.dtype):
        self.graph, self.constants, self.dtype = graph, constants, dtype
        steps, attention = row_steps(dtype), paged_compiled.kernel(dtype)
        if steps is None or attention is None:
            raise Unlike("there are no kernels")
        self.functions, self.attention = steps.functions, attention
        self.steps: list[KernelStep] = []
        self._buffers: dict[int, Buffer] = {}  # by their memory, as views have it
        self.views: dict[Node, torch.Tensor] = {}  # of kernels, and torch's that they read
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
            torch.Tensor.view: self._look,
            torch.reshape: self._look,
            torch.transpose: self._look,
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
        return node in self.views and self._buffer(self.views[node]).given is None

    @property
    def buffers(self) -> list[Buffer]:
        return list(self._buffers.values())

    def _buffer(self, view: torch.Tensor) -> Buffer:
        return self._buffers[view.untyped_storage()._cdata]

    def buffer_of(self, place: Any) -> Buffer | None:
        """The buffer that a place of a step is in; None for a constant."""
        is_view = isinstance(place, torch.Tensor) and place.is_meta
        return self._buffer(place) if is_view else None

    def read_rows(self, tables: Mapping[Node, tuple[Table | torch.Tensor, Node]]) -> None:
        """Read what kernels are given where it lies: rows of a table, by the numbers of an
        input."""
        steps: list[KernelStep] = []
        for node, (table, number) in tables.items():
            view = self._view(node)
            buffer = self._buffer(view)
            buffer.given, buffer.last_used = None, max(buffer.last_used, 0)
            places = (table, self.number(number), view)
            steps.append(KernelStep(CallKind.ROWS, None, places, (buffer.token_bytes,), ()))
        for buffer in self.buffers:
            buffer.last_used += len(steps)
        self.steps[:0] = steps

    def number(self, node: Node) -> torch.Tensor:
        """An input of one whole number a token."""
        if node not in self.views:
            self.views[node] = self._new([TOKENS], given=node)
        return self.views[node]

    def _view(self, node: Any) -> torch.Tensor:
        """The numbers that a kernel reads; torch's tensor is given to it side by side."""
        if not isinstance(node, Node) or node in self.constants:
            raise Unlike(f"{node} is no state")
        if node not in self.views:
            shape = shape_of(node)
            if node.meta["val"].dtype != self.dtype:
                raise Unlike(f"{node} is {node.meta['val'].dtype}")
            self.views[node] = self._new(shape, given=node)
        return self.views[node]

    def _new(self, shape: Sequence[int], given: Node | None = None) -> torch.Tensor:
        made = torch.empty(shape, dtype=self.dtype, device="meta")
        self._buffers[made.untyped_storage()._cdata] = Buffer(made, given)
        return made

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
        places: Sequence[PackedLinear | torch.Tensor | None],
        numbers: Sequence[int],
        reals: Sequence[float] = (),
    ) -> None:
        for place in places:
            if (buffer := self.buffer_of(place)) is not None:
                buffer.last_used = len(self.steps)
        self.steps.append(KernelStep(kind, function, places, numbers, reals))

    def _multiply(self, node: Node) -> None:
        packed, rows = self.constants[node.args[0]], self._view(node.args[1])
        width = width_of(rows)
        if packed.few is None or stride_of(rows) != width:
            raise Unlike("a product that is torch's")
        out = self._new([*rows.shape[:-1], packed.few.num_outputs])
        self._do(CallKind.MULTIPLY, None, (rows, packed, out), (width, width_of(out)))
        self.views[node] = out

    def _item(self, node: Node) -> None:
        """One output of a product."""
        product, index = node.args
        sizes = self.constants[product.args[0]].sizes
        self.views[node] = self.views[product].narrow(-1, sum(sizes[:index]), sizes[index])

    def _normalise(self, node: Node) -> None:
        x, weight, eps, offset, wide = node.args
        read, width = self._view(x), fixed(x.meta["val"].shape[-1])
        assert width is not None
        out = self._new(read.shape)
        numbers = (width_of(read) // width, width, stride_of(read), self.dtype.itemsize, int(wide))
        self._do(
            CallKind.NORMALISE,
            self.functions["normalise"],
            (read, self.weight(weight), out),
            numbers,
            (eps, offset),
        )
        self.views[node] = out

    def _rotate(self, node: Node) -> None:
        x, cosine, sine = map(self._view, node.args)
        heads, dim = _heads_of(x)
        out = self._new([1, TOKENS, heads, dim])
        self._do(
            CallKind.ROTATE,
            self.functions["rotate"],
            (x, cosine, sine, out),
            (heads, dim, x.stride(2), x.stride(1)),
        )
        self.views[node] = out.transpose(1, 2)

    def _clear(self, node: Node, number: Node) -> None:
        read = self._view(node.args[0])
        out = self._new(read.shape)
        bytes_each = self.dtype.itemsize
        numbers = (bytes_each * width_of(read), bytes_each * stride_of(read))
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
            raise Unlike(f"{name} of {tuple(x.shape)} and {tuple(y.shape)}")
        out, (width,) = self._new(x.shape), {width_of(x), width_of(y)}
        self._do(kind, self.functions[name], (x, y, out), (width, stride_of(x), stride_of(y)))
        self.views[node] = out

    def _join(self, node: Node) -> None:
        parts = [self._view(part) for part in node.args[0]]
        if node.args[1:] not in ((-1,), (parts[0].ndim - 1,)):
            raise Unlike("tokens put together")
        widths, out = list(map(width_of, parts)), self._new(shape_of(node))
        if widths != [part.shape[-1] for part in parts]:
            raise Unlike("parts of several rows")
        bytes_each = self.dtype.itemsize
        for part, width, to in zip(parts, widths, out.split(widths, -1), strict=True):
            numbers = [bytes_each * count for count in (width, stride_of(part), stride_of(out))]
            self._do(CallKind.COPY, None, (part, to), numbers)
        self.views[node] = out

    def _attend(self, node: Node) -> None:
        _, query, key, value, layer, scaling, window, chunked, softcap, sinks = node.args
        q, k, v = map(self._view, (query, key, value))
        (heads, key_dim), _, (kv_heads, value_dim) = map(_heads_of, (q, k, v))
        if softcap is not None or sinks is not None:
            raise Unlike("an attention that is torch's")
        if max(key_dim, value_dim) > paged_compiled.MOST_DIM:
            raise Unlike("an attention that is torch's")
        out = self._new([1, TOKENS, heads, value_dim])
        strides = [view.stride(dim) for view in (q, k, v) for dim in (1, 2)]
        seen = 2 * (window or 0) + int(bool(window and chunked))
        numbers = (layer, heads, kv_heads, key_dim, value_dim, *strides, seen)
        self._do(CallKind.ATTEND, self.attention, (q, k, v, out), numbers, (scaling,))
        self.views[node] = out
        self.layers.append(
            Layer(layer, LayerShape(kv_heads, key_dim, value_dim), heads // kv_heads)
        )

    def _look(self, node: Node) -> None:
        """A view, as torch makes it; a copy or tokens that are mixed are no kernel's."""
        read = self._view(node.args[0])
        if node.target is torch.transpose:
            found = read.transpose(*node.args[1:])
        else:
            shape = shape_of(node)
            if math.prod(shape) != read.numel():
                raise Unlike(f"{node} mixes tokens")
            found = read.reshape(shape)
        is_view = found.untyped_storage()._cdata in self._buffers
        if not is_view or stride_of(found) != stride_of(read):
            raise Unlike(f"{node} mixes tokens")
        self.views[node] = found
