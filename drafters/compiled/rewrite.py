"""Rewriting of a captured forward before it is replayed: the same numbers, to float rounding, in
fewer operations.

On a small model an operation costs more to call than to compute, so every pass removes calls. No
pass depends on a model family: each looks for a pattern that is worth it wherever it stands.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch
from torch.fx import Graph, GraphModule, Node

from draftsmith.drafters.compiled.packed_linear import PackedLinear, packable
from draftsmith.drafters.compiled.patterns import (
    bias_of,
    call_directly,
    drop_no_operations,
    fuse_gates,
    fuse_norms,
    join,
    merge_equal,
    replace,
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
    fuse_norms(module.graph, partial(_norm, module.graph))
    fuse_rotations(module.graph)
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


def _norm(
    graph: Graph, x: Node, weight: Node | None, eps: float, offset: float, wide: bool
) -> Node | None:
    if (steps := _steps(x)) is not None:
        return graph.call_function(steps.normalise, (x, weight, eps, offset, wide))
    if offset or stand_in(x).dtype != torch.float32:
        return None
    return graph.call_function(torch.rms_norm, (x, [stand_in(x).shape[-1]], weight, eps))


def _steps(node: Node) -> RowSteps | None:
    """Steps that a compiled kernel takes of the node's rows."""
    value = stand_in(node)
    return row_steps(value.dtype) if reads_freely(value.device) else None


def fuse_rotations(graph: Graph) -> None:
    for root in list(graph.nodes):
        parts = rotation_parts(root)
        if parts is not None and (steps := _steps(parts[0])) is not None:
            with graph.inserting_before(root):
                fused = graph.call_function(steps.rotate, parts)
            replace(graph, root, fused)


def _gate(graph: Graph, x: Node, factor: Node, activation: str) -> Node | None:
    steps = _steps(x) if activation == "silu" else None
    return None if steps is None else graph.call_function(steps.gate, (x, factor))


def pack_linears(module: GraphModule, copies: int) -> list[PackedLinear]:
    """Linears of one input become one multiplication with packed weights."""
    graph = module.graph
    groups: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        weight = node.args[1]
        if weight.op == "get_attr" and packable(tensor(module, weight)):
            groups[node.args[0]].append(node)
    read = (tensor(module, one.args[1]).nbytes for nodes in groups.values() for one in nodes)
    pass_bytes, packed = sum(read), []
    for index, nodes in enumerate(groups.values()):
        weights = [tensor(module, node.args[1]) for node in nodes]
        biases = [bias_of(module, node) for node in nodes]
        packed.append(PackedLinear(weights, biases, copies=copies, pass_bytes=pass_bytes))
        # Not the group's own key, in whose place another call may stand by now.
        join(module, f"_packed{index}", nodes[0].args[0], nodes, packed[-1])
    return packed
