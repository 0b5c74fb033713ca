"""Rewriting of a captured forward before it is replayed: the same numbers, to float rounding, in
fewer operations.

On a small model an operation costs more to call than to compute, so every pass removes calls. No
pass depends on a model family: each looks for a pattern that is worth it wherever it stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from draftsmith.drafters.compiled.packed_linear import GatedLinear, PackedLinear, packable
from draftsmith.drafters.compiled.patterns import (
    bias_of,
    call_directly,
    drop_no_operations,
    fixed,
    fuse_gates,
    join,
    merge_equal,
    norm_parts,
    norm_weight,
    only_user,
    replace,
    rotates_heads,
    rotation_parts,
    stand_in,
    tensor,
)
from draftsmith.kernels.dispatch import reads_freely
from draftsmith.kernels.products.row_steps import RowSteps, row_steps

aten = torch.ops.aten


def rewrite(module: GraphModule, *, copies: int) -> list[PackedLinear]:
    """Rewrites in place. `copies` of the weights may be made: one laid out for few rows, a second
    for more. Returns their holders, the caller's to refresh."""
    drop_no_operations(module.graph)
    merge_equal(module.graph)
    count_inputs(module.graph)
    fuse_norms(module)
    fuse_rotations(module)
    fuse_gates(module.graph, partial(_gate, module.graph))
    module.graph.eliminate_dead_code()
    packed = pack_linears(module, copies) if copies else []
    call_directly(module.graph)
    module.graph.eliminate_dead_code()
    return packed


def count_inputs(graph: Graph) -> None:
    """The number of tokens is read off an input, not off a state that has to be there for it."""
    inputs = [node for node in graph.nodes if node.op == "placeholder" and "val" in node.meta]
    sizes = {
        str(size): (node, dim)
        for node in reversed(inputs)
        for dim, size in enumerate(stand_in(node).shape)
    }
    for node in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        node.args = sizes.get(str(node.meta["val"]), node.args)


def fuse_norms(module: GraphModule) -> None:
    """x * rsqrt(mean(x ** 2, -1) + eps), and the weight that follows, as one call."""
    graph = module.graph
    for root in list(graph.nodes):
        if (parts := norm_parts(root)) is None:
            continue
        norm = _narrow_norm(*parts, root) or _wide_norm(*parts, root)
        width = fixed(stand_in(norm.x).shape[-1])
        if width is None:
            continue
        steps = _steps(norm.x)
        with graph.inserting_before(norm.last):
            if steps is not None:
                arguments = (norm.x, norm.weight, norm.eps, 1 / width)
                fused = graph.call_function(steps.normalise, arguments)
            elif stand_in(norm.x).dtype == torch.float32:
                eps = _constant(module, "eps", norm.eps)
                fused = graph.call_function(rms_norm, (norm.x, norm.weight, eps, 1 / width))
            else:
                continue
        replace(graph, norm.last, fused)


class _Norm(NamedTuple):
    x: Node
    weight: Node | None
    eps: float
    last: Node  # what the norm gives


def _wide_norm(x: Node, eps: float, root: Node) -> _Norm:
    outer = only_user(root)
    weight = norm_weight(outer, root) if outer is not None else None
    if outer is None or weight is None:
        return _Norm(x, None, eps, root)
    return _Norm(x, weight, eps, outer)


def _narrow_norm(x: Node, eps: float, root: Node) -> _Norm | None:
    """A norm in float32 of a narrower x, narrowed again before the weight."""
    if x.target is not aten.to.dtype or _steps(x.args[0]) is None:
        return None
    narrowed = only_user(root)
    if narrowed is None or narrowed.target is not aten.to.dtype:
        return None
    outer = only_user(narrowed)
    weight = norm_weight(outer, narrowed) if outer is not None else None
    if outer is None or weight is None or stand_in(narrowed).dtype != stand_in(x.args[0]).dtype:
        return None
    return _Norm(x.args[0], weight, eps, outer)


def _steps(node: Node) -> RowSteps | None:
    """Steps that a compiled kernel takes of the node's rows."""
    value = stand_in(node)
    return row_steps(value.dtype) if reads_freely(value.device) else None


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


def fuse_rotations(module: GraphModule) -> None:
    """a * cos + cat(-a[half:], a[:half]) * sin as a * cos + roll(a, half) * (sin with its first
    half negated)."""
    graph = module.graph
    signed: dict[Node, Node] = {}
    for root in list(graph.nodes):
        if (parts := rotation_parts(root)) is None:
            continue
        a, cos, sin, half = parts
        if sin not in signed:
            signed[sin] = _negated_first_half(module, sin, half)
        steps = (
            _steps(a)
            if rotates_heads(a, cos) and stand_in(sin).dtype == stand_in(a).dtype
            else None
        )
        with graph.inserting_before(root):
            if steps is not None:
                fused = graph.call_function(steps.rotate, (a, cos, signed[sin]))
            else:
                straight = graph.call_function(torch.mul, (a, cos))
                rolled = graph.call_function(torch.roll, (a, half, -1))
                fused = graph.call_function(torch.addcmul, (straight, rolled, signed[sin]))
        replace(graph, root, fused)


def _gate(graph: Graph, x: Node, factor: Node, activation: str) -> Node | None:
    steps = _steps(x) if activation == "silu" else None
    return None if steps is None else graph.call_function(steps.gate, (x, factor))


def _negated_first_half(module: GraphModule, sin: Node, half: int) -> Node:
    """Right after `sin` itself, so that all layers share it."""
    value = stand_in(sin)
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


def pack_linears(module: GraphModule, copies: int) -> list[PackedLinear]:
    """Linears of one input become one multiplication with packed weights."""
    graph = module.graph
    groups: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        weight = node.args[1]
        if weight.op == "get_attr" and packable(tensor(module, weight)):
            groups[node.args[0]].append(node)
    read = (tensor(module, one.args[1]).nbytes for nodes in groups.values() for one in nodes)
    options = {"copies": copies, "pass_bytes": sum(read)}
    return [
        _pack(module, f"_packed{index}", nodes, options)
        for index, nodes in enumerate(groups.values())
    ]


def _pack(
    module: GraphModule, name: str, nodes: list[Node], options: Mapping[str, Any]
) -> PackedLinear:
    gate = _gate_of(nodes)
    linears = nodes if gate is None else gate.args
    weights = [tensor(module, node.args[1]) for node in linears]
    biases = [bias_of(module, node) for node in linears]
    if gate is None:
        packed = PackedLinear(weights, biases, **options)
    else:
        packed = GatedLinear(weights, biases, gate.target.__self__, **options)
    # Not the group's own key, in whose place another call may stand by now.
    join(module, name, linears[0].args[0], nodes if gate is None else [gate], packed)
    return packed


def _gate_of(nodes: list[Node]) -> Node | None:
    """The gate that alone reads two linears."""
    users = {user for node in nodes for user in node.users}
    if len(nodes) != 2 or len(users) != 1:
        return None
    (gate,) = users
    is_gate = getattr(gate.target, "__func__", None) is RowSteps.gate
    return gate if is_gate and set(gate.args) == set(nodes) else None
