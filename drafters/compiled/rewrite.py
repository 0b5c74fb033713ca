"""Rewriting of a captured forward before it is replayed: the same numbers, to float rounding, in
fewer operations.

On a small model an operation costs more to call than to compute, so every pass removes calls. No
pass depends on a model family: each looks for a pattern that is worth it wherever it stands.
"""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from draftsmith.drafters.compiled.packed_linear import PackedLinear, packable
from draftsmith.drafters.int8_linear import int8_linear
from draftsmith.kernels.int8_rows import Int8Rows, Int8Weight
from draftsmith.kernels.row_steps import RowSteps, row_steps

aten = torch.ops.aten
Product = Callable[[torch.Tensor], Sequence[torch.Tensor]]
# Torch's own functions do the same as the operators of a capture and are called with half the
# overhead.
DIRECT: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.cat.default: torch.cat,
    aten.embedding.default: torch.embedding,
    aten.linear.default: torch._C._nn.linear,
    aten.mul.Tensor: torch.mul,
    aten.neg.default: torch.neg,
    aten.reshape.default: torch.reshape,
    aten.silu.default: torch._C._nn.silu,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}


def rewrite(module: GraphModule, *, copies: int) -> list[PackedLinear]:
    """Rewrites in place. `copies` of the weights may be made: one laid out for few rows, a second
    for more. Returns their holders, the caller's to refresh."""
    drop_no_operations(module.graph)
    merge_equal(module.graph)
    fuse_norms(module)
    fuse_rotations(module)
    fuse_gates(module.graph)
    packed = pack_linears(module, copies) if copies else []
    join_int8(module)
    for node in module.graph.nodes:
        if node.target in DIRECT:
            node.target = DIRECT[node.target]
    module.graph.eliminate_dead_code()
    return packed


def drop_no_operations(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            graph.erase_node(node)
        elif _does_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _does_nothing(node: Node) -> bool:
    if node.target in (aten.detach.default, aten.alias.default, aten.lift_fresh.default):
        return True
    if node.target is aten.dropout.default:
        return not node.args[2]
    if node.target is aten.mul.Tensor:
        return node.args[1] == 1.0 and _same_type(node)
    if node.target is aten.slice.Tensor:
        return node.args[2:] == (0, sys.maxsize)
    return node.target in (aten.to.dtype, aten.to.device, aten._to_copy.default) and _same_type(
        node
    )


def merge_equal(graph: Graph) -> None:
    """Operations that every layer repeats on the same inputs are done once."""
    operations = [
        node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    ]
    if any(operation._schema.is_mutable for operation in operations):
        return  # then the same inputs need not hold the same values
    seen: dict[str, Node] = {}
    for node in list(graph.nodes):
        plain = (
            isinstance(node.target, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded not in node.target.tags
        )
        if node.op != "get_attr" and not plain:
            continue
        first = seen.setdefault(repr((node.target, node.args, node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _same_type(node: Node) -> bool:
    before, after = _value(node.args[0]), _value(node)
    return before.dtype == after.dtype and before.device == after.device


def _value(node: Node) -> torch.Tensor:
    """The stand-in tensor that the capture saw: shape and type without numbers."""
    return node.meta["val"]


def fixed(size: int | torch.SymInt) -> int | None:
    """A size that does not depend on the number of tokens, else None."""
    return int(size) if isinstance(size, int) or not size.node.expr.free_symbols else None


def fuse_norms(module: GraphModule) -> None:
    """x * rsqrt(mean(x ** 2, -1) + eps), and the weight that follows, as one call."""
    graph = module.graph
    for root in list(graph.nodes):
        if (parts := _norm_parts(root)) is None:
            continue
        norm = _narrow_norm(*parts, root) or _wide_norm(*parts, root)
        width = fixed(_value(norm.x).shape[-1])
        if width is None:
            continue
        steps = _steps(norm.x)
        with graph.inserting_before(norm.last):
            if steps is not None:
                arguments = (norm.x, norm.weight, norm.eps, 1 / width)
                fused = graph.call_function(steps.normalise, arguments)
            elif _value(norm.x).dtype == torch.float32:
                eps = _constant(module, "eps", norm.eps)
                fused = graph.call_function(rms_norm, (norm.x, norm.weight, eps, 1 / width))
            else:
                continue
        _replace(graph, norm.last, fused)
        for node in norm.inner:
            graph.erase_node(node)


class _Norm(NamedTuple):
    x: Node
    weight: Node | None
    eps: float
    last: Node  # what the norm gives
    inner: list[Node]  # between the two, last first


def _wide_norm(x: Node, eps: float, inner: list[Node], root: Node) -> _Norm:
    outer = _only_user(root)
    weight = _norm_weight(outer, root) if outer is not None else None
    if outer is None or weight is None:
        return _Norm(x, None, eps, root, inner)
    return _Norm(x, weight, eps, outer, [root, *inner])


def _narrow_norm(x: Node, eps: float, inner: list[Node], root: Node) -> _Norm | None:
    """A norm in float32 of a narrower x, narrowed again before the weight."""
    if x.target is not aten.to.dtype or _steps(x.args[0]) is None:
        return None
    narrowed = _only_user(root)
    if narrowed is None or narrowed.target is not aten.to.dtype:
        return None
    outer = _only_user(narrowed)
    weight = _norm_weight(outer, narrowed) if outer is not None else None
    if outer is None or weight is None or _value(narrowed).dtype != _value(x.args[0]).dtype:
        return None
    return _Norm(x.args[0], weight, eps, outer, [narrowed, root, *inner])


def _steps(node: Node) -> RowSteps | None:
    """Steps that a compiled kernel takes of the node's rows."""
    value = _value(node)
    return row_steps(value.dtype) if value.device.type == "cpu" else None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: torch.Tensor, share: float
) -> torch.Tensor:
    """[..., H]; `share` is 1 / H. A third faster than torch's own, which is put together from more
    operations."""
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    normed = torch.mul(x, torch.addcmul(eps, norm, norm, value=share).rsqrt_())
    return normed if weight is None else torch.mul(normed, weight)


def _constant(module: GraphModule, name: str, value: float) -> Node:
    """A float32 scalar on the CPU, which torch combines with tensors of any device."""
    name = f"_{name}_{value!r}".replace(".", "_").replace("-", "_")
    if name not in module._buffers:
        module.register_buffer(name, torch.tensor(value, dtype=torch.float32))
    return module.graph.get_attr(name)


def _norm_parts(root: Node) -> tuple[Node, float, list[Node]] | None:
    """(x, eps, the nodes between, last first)."""
    if root.target is not aten.mul.Tensor or not isinstance(root.args[1], Node):
        return None
    x, scale = root.args
    chain = []
    for target in (aten.rsqrt.default, aten.add.Tensor, aten.mean.dim, aten.pow.Tensor_Scalar):
        if not isinstance(scale, Node) or scale.target is not target or len(scale.users) != 1:
            return None
        chain.append(scale)
        scale = scale.args[0]
    _, add, mean, power = chain
    right = (
        scale is x
        and isinstance(add.args[1], float)
        and mean.args[1:] == ([-1], True)
        and power.args[1] == 2
    )
    return (x, add.args[1], chain) if right and _value(x).dtype == torch.float32 else None


def _norm_weight(outer: Node, normed: Node) -> Node | None:
    if outer.target is not aten.mul.Tensor or len(outer.args) != 2:
        return None
    other = outer.args[0] if outer.args[1] is normed else outer.args[1]
    fits = (
        isinstance(other, Node)
        and other is not normed
        and _value(other).shape == _value(normed).shape[-1:]
    )
    return other if fits and _value(other).dtype == _value(normed).dtype else None


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _replace(graph: Graph, old: Node, new: Node) -> None:
    new.meta["val"] = old.meta["val"]
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def fuse_rotations(module: GraphModule) -> None:
    """a * cos + cat(-a[half:], a[:half]) * sin as a * cos + roll(a, half) * (sin with its first
    half negated)."""
    graph = module.graph
    signed: dict[Node, Node] = {}
    for root in list(graph.nodes):
        if (parts := _rotation_parts(root)) is None:
            continue
        a, cos, sin, half = parts
        if sin not in signed:
            signed[sin] = _negated_first_half(module, sin, half)
        steps = (
            _steps(a) if _rotates_heads(a, cos) and _value(sin).dtype == _value(a).dtype else None
        )
        with graph.inserting_before(root):
            if steps is not None:
                fused = graph.call_function(steps.rotate, (a, cos, signed[sin]))
            else:
                straight = graph.call_function(torch.mul, (a, cos))
                rolled = graph.call_function(torch.roll, (a, half, -1))
                fused = graph.call_function(torch.addcmul, (straight, rolled, signed[sin]))
        _replace(graph, root, fused)


def _rotates_heads(a: Node, cos: Node) -> bool:
    """True for a [1, heads, T, D] and cos [1, 1, T, D] of one dtype."""
    heads, angles = _value(a), _value(cos)
    return (
        heads.ndim == 4
        and fixed(heads.shape[0]) == 1
        and fixed(heads.shape[1]) is not None
        and tuple(angles.shape) == (1, 1, *heads.shape[2:])
        and angles.dtype == heads.dtype
    )


def fuse_gates(graph: Graph) -> None:
    """silu(x) * factor as one call."""
    for root in list(graph.nodes):
        if root.target is not aten.mul.Tensor or len(root.args) != 2:
            continue
        for opened, factor in (root.args, root.args[::-1]):
            if _is_gate(opened, factor) and (steps := _steps(opened)) is not None:
                with graph.inserting_before(root):
                    fused = graph.call_function(steps.gate, (opened.args[0], factor))
                _replace(graph, root, fused)
                graph.erase_node(opened)
                break


def _is_gate(opened: Any, factor: Any) -> bool:
    if not (isinstance(opened, Node) and isinstance(factor, Node)) or opened is factor:
        return False
    if opened.target is not aten.silu.default or len(opened.users) != 1:
        return False
    one, other = _value(opened), _value(factor)
    return (
        one.ndim == 3
        and fixed(one.shape[0]) == 1
        and tuple(one.shape) == tuple(other.shape)
        and one.dtype == other.dtype
    )


def _negated_first_half(module: GraphModule, sin: Node, half: int) -> Node:
    """Right after `sin` itself, so that all layers share it."""
    value = _value(sin)
    name = f"_signs_{half}"
    if name not in module._buffers:
        signs = torch.ones(2 * half, dtype=value.dtype, device=value.device)
        signs[:half] = -1
        module.register_buffer(name, signs)
    with module.graph.inserting_after(sin):
        signs_node = module.graph.get_attr(name)
    with module.graph.inserting_after(signs_node):
        product = module.graph.call_function(torch.mul, (sin, signs_node))
    product.meta["val"] = value
    return product


def _rotation_parts(root: Node) -> tuple[Node, Node, Node, int] | None:
    """(a, cos, sin, half width)."""
    if root.target is not aten.add.Tensor or len(root.args) != 2:
        return None
    straight, turned = root.args
    if not all(
        isinstance(node, Node) and node.target is aten.mul.Tensor for node in (straight, turned)
    ):
        return None
    (a, cos), (swapped, sin) = straight.args, turned.args
    if (
        not isinstance(swapped, Node)
        or swapped.target is not aten.cat.default
        or not isinstance(a, Node)
    ):
        return None
    width = fixed(_value(a).shape[-1])
    if width is None or swapped.args[1:] != (-1,) or len(swapped.args[0]) != 2:
        return None
    negated, first = swapped.args[0]
    if negated.target is not aten.neg.default:
        return None
    half = width // 2
    is_half_turn = _is_slice(first, a, 0, half) and _is_slice(negated.args[0], a, half, width)
    return (a, cos, sin, half) if is_half_turn and width == 2 * half else None


def _is_slice(node: Node, of: Node, begin: int, end: int) -> bool:
    if node.target is not aten.slice.Tensor or node.args[0] is not of or len(node.args) != 4:
        return False
    # Python's open end is captured as the largest integer.
    return (
        node.args[1] in (_value(of).ndim - 1, -1)
        and node.args[2] == begin
        and _value(node).shape[-1] == end - begin
    )


def pack_linears(module: GraphModule, copies: int) -> list[PackedLinear]:
    """Linears of one input become one multiplication with packed weights."""
    graph = module.graph
    groups: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        weight = node.args[1]
        if weight.op == "get_attr" and packable(_tensor(module, weight)):
            groups[node.args[0]].append(node)
    return [
        _pack(module, f"_packed{index}", nodes, copies)
        for index, nodes in enumerate(groups.values())
    ]


def _pack(module: GraphModule, name: str, nodes: list[Node], copies: int) -> PackedLinear:
    biases = [node.args[2] if len(node.args) > 2 else None for node in nodes]
    packed = PackedLinear(
        [_tensor(module, node.args[1]) for node in nodes],
        [None if bias is None else _tensor(module, bias) for bias in biases],
        copies=copies,
    )
    _join(module, name, nodes, packed)
    return packed


def join_int8(module: GraphModule) -> None:
    """Products of one input with codes of 8 bits become one call, which reads them where they
    lie."""
    groups: dict[Node, list[Node]] = defaultdict(list)
    for node in module.graph.find_nodes(op="call_function", target=int8_linear):
        groups[node.args[0]].append(node)
    for index, (rows, nodes) in enumerate(groups.items()):
        weights, biases = [], []
        for node in nodes:
            codes, scales, bias = (arg and _tensor(module, arg) for arg in node.args[1:])
            weights.append(Int8Weight(codes, scales))
            biases.append(bias)
        _join(module, f"_int8_{index}", nodes, Int8Rows(weights, biases, _value(rows).dtype))


def _join(module: GraphModule, name: str, nodes: list[Node], product: Product) -> None:
    """One call in place of `nodes`, each of which is one of its outputs."""
    graph = module.graph
    module.__dict__[name] = product
    with graph.inserting_before(nodes[0]):
        # Not `graph.get_attr`, which warns of whatever is neither a tensor nor a module.
        attribute = graph.create_node("get_attr", name)
        call = graph.call_function(multiply, (attribute, nodes[0].args[0]))
        outputs = [
            graph.call_function(operator.getitem, (call, index)) for index in range(len(nodes))
        ]
    for node, output in zip(nodes, outputs):
        _replace(graph, node, output)


def multiply(product: Product, rows: torch.Tensor) -> Any:
    return product(rows)


def _tensor(module: GraphModule, node: Node) -> torch.Tensor:
    value = module
    for part in node.target.split("."):
        value = getattr(value, part)
    return value
