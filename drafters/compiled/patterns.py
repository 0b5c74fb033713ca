"""Patterns of a captured forward, and how parts of its graph are replaced.

No pattern depends on a model family: each is looked for wherever it stands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

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
_NARROWING = (aten.to.dtype, aten.type_as.default, aten._to_copy.default)
_END = 2**63 - 1  # of a slice that goes to the end
_ACTIVATIONS = {aten.silu.default: "silu", aten.gelu.default: "gelu"}


def stand_in(node: Node) -> torch.Tensor:
    """The stand-in tensor that the capture saw: shape and type without numbers."""
    return node.meta["val"]


def fixed(size: int | torch.SymInt) -> int | None:
    """A size that does not depend on the number of tokens, else None."""
    return int(size) if isinstance(size, int) or not size.node.expr.free_symbols else None


def only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def replace(graph: Graph, old: Node, new: Node) -> None:
    new.meta["val"] = old.meta["val"]
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def tensor(module: GraphModule, node: Node) -> torch.Tensor:
    value = module
    for part in node.target.split("."):
        value = getattr(value, part)
    return value


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
        return node.args[1] == 1.0 and same_type(node)
    if node.target is aten.slice.Tensor:
        return tuple(node.args[2:]) == (0, _END)
    return node.target in (*_NARROWING, aten.to.device) and same_type(node)


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


def same_type(node: Node) -> bool:
    before, after = stand_in(node.args[0]), stand_in(node)
    return before.dtype == after.dtype and before.device == after.device


def _norm_parts(root: Node) -> tuple[Node, float] | None:
    """(x, eps)."""
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
    return (x, add.args[1]) if right and stand_in(x).dtype == torch.float32 else None


class NormNodes(NamedTuple):
    x: Node
    weight: Node | None
    eps: float
    offset: float
    wide: bool
    last: Node  # what the norm gives


def fuse_norms(graph: Graph, norm: Callable[..., Node | None]) -> None:
    """RMS norms of every rounding as the call that `norm` makes of x, weight, eps, the offset of
    the weight and whether the weight multiplies in float32, where it makes one."""
    for root in list(graph.nodes):
        if (found := _norm(root)) is not None:
            with graph.inserting_before(found.last):
                fused = norm(*found[:-1])
            if fused is not None:
                replace(graph, found.last, fused)


def _norm(root: Node) -> NormNodes | None:
    parts = _norm_parts(root)
    if parts is None or fixed(stand_in(root).shape[-1]) is None:
        return None
    x, eps = parts
    user = only_user(root)
    if x.target is not aten.to.dtype:
        weight, offset = _factor(user, root)
        return NormNodes(x, weight, eps, offset, True, root if weight is None else user or root)
    x = x.args[0]
    if user is None:
        return None
    if _narrows(user, x):
        outer = only_user(user)
        weight, _ = _factor(outer, user)
        if outer is None or weight is None or stand_in(weight).dtype != stand_in(x).dtype:
            return NormNodes(x, None, eps, 0.0, False, user)
        return NormNodes(x, weight, eps, 0.0, False, outer)
    weight, offset = _factor(user, root)
    last = only_user(user)
    if weight is None or last is None or not _narrows(last, x):
        return None
    return NormNodes(x, weight, eps, offset, True, last)


def _narrows(node: Node, x: Node) -> bool:
    """True for the conversion of a norm in float32 to the type of `x`."""
    return node.target in _NARROWING and stand_in(node).dtype == stand_in(x).dtype


def _factor(outer: Node | None, normed: Node) -> tuple[Node | None, float]:
    """Weight that `outer` multiplies `normed` by, and the offset that is added to it."""
    if outer is None or outer.target is not aten.mul.Tensor or len(outer.args) != 2:
        return None, 0.0
    other = outer.args[0] if outer.args[1] is normed else outer.args[1]
    if not isinstance(other, Node) or other is normed:
        return None, 0.0
    wide = stand_in(outer).dtype == torch.float32
    weight, offset = other, 0.0
    if wide and other.target is aten.add.Tensor and isinstance(other.args[1], float):
        weight, offset = other.args
    if wide and weight.target is aten.to.dtype and stand_in(weight).dtype == torch.float32:
        weight = weight.args[0]
    fits = (
        weight.op == "get_attr"
        and stand_in(weight).shape == stand_in(normed).shape[-1:]
        and stand_in(weight).is_floating_point()
    )
    return (weight, offset) if fits else (None, 0.0)


def _rotates_heads(a: Node, cos: Node) -> bool:
    """True for a [1, heads, T, D] and cos [1, 1, T, D] of one dtype."""
    heads, angles = stand_in(a), stand_in(cos)
    return (
        heads.ndim == 4
        and fixed(heads.shape[0]) == 1
        and fixed(heads.shape[1]) is not None
        and tuple(angles.shape) == (1, 1, *heads.shape[2:])
        and angles.dtype == heads.dtype
    )


def gate_activation(opened: Any, factor: Any) -> str | None:
    """Name of the activation that gives `opened` of rows like those of `factor`, which it is
    multiplied by; None for anything else."""
    if not (isinstance(opened, Node) and isinstance(factor, Node)) or opened is factor:
        return None
    if opened.target not in _ACTIVATIONS or len(opened.users) != 1:
        return None
    one, other = stand_in(opened), stand_in(factor)
    fits = (
        one.ndim == 3
        and fixed(one.shape[0]) == 1
        and tuple(one.shape) == tuple(other.shape)
        and one.dtype == other.dtype
    )
    tanh = opened.kwargs.get("approximate", "none") == "tanh"
    return _ACTIVATIONS[opened.target] + "_tanh" * tanh if fits else None


def fuse_gates(graph: Graph, gate: Callable[[Node, Node, str], Node | None]) -> None:
    """activation(x) * factor as the call that `gate` makes of x, the factor and the name of the
    activation, where it makes one."""
    for root in list(graph.find_nodes(op="call_function", target=aten.mul.Tensor)):
        for opened, factor in (root.args, root.args[::-1]):
            if (activation := gate_activation(opened, factor)) is None:
                continue
            with graph.inserting_before(root):
                fused = gate(opened.args[0], factor, activation)
            if fused is not None:
                replace(graph, root, fused)
                break


def cleared_at_zero(node: Node) -> Node | None:
    """The input of whole numbers at whose zeros masked_fill([..., T, H], number == 0, 0) clears the
    token; None for anything else."""
    if node.target is not aten.masked_fill.Scalar or node.args[2] != 0:
        return None
    mask = node.args[1]
    equal = mask.args[0] if mask.target in (aten.unsqueeze.default, torch.unsqueeze) else mask
    if equal.target is not aten.eq.Scalar or equal.args[1] != 0 or mask.args[1] not in (-1, 2):
        return None
    number, shape = equal.args[0], stand_in(node).shape
    one_each = number.op == "placeholder" and stand_in(number).shape == shape[:-1]
    return number if one_each and stand_in(number).dtype == torch.int64 else None


def rotation_parts(root: Node) -> tuple[Node, Node, Node] | None:
    """(a, cos, sin) of heads that are rotated."""
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
    width = fixed(stand_in(a).shape[-1])
    if width is None or swapped.args[1:] != (-1,) or len(swapped.args[0]) != 2:
        return None
    negated, first = swapped.args[0]
    if negated.target is not aten.neg.default:
        return None
    half = width // 2
    is_half_turn = _is_slice(first, a, 0, half) and _is_slice(negated.args[0], a, half, width)
    fits = is_half_turn and width == 2 * half and _rotates_heads(a, cos) and _rotates_heads(a, sin)
    return (a, cos, sin) if fits else None


def _is_slice(node: Node, of: Node, begin: int, end: int) -> bool:
    if node.target is not aten.slice.Tensor or node.args[0] is not of or len(node.args) != 4:
        return False
    # Python's open end is captured as the largest integer.
    return (
        node.args[1] in (stand_in(of).ndim - 1, -1)
        and node.args[2] == begin
        and stand_in(node).shape[-1] == end - begin
    )


def bias_of(module: GraphModule, linear: Node) -> torch.Tensor | None:
    bias = linear.args[2] if len(linear.args) > 2 else None
    return bias and tensor(module, bias)


def join(
    module: GraphModule, name: str, rows: Node, nodes: Sequence[Node], product: Product
) -> None:
    """One call, of `rows`, in place of `nodes`, each of which is one of its outputs."""
    graph = module.graph
    module.__dict__[name] = product
    with graph.inserting_before(nodes[0]):
        # Not `graph.get_attr`, which warns of whatever is neither a tensor nor a module.
        attribute = graph.create_node("get_attr", name)
        call = graph.call_function(multiply, (attribute, rows))
        outputs = [
            graph.call_function(operator.getitem, (call, index)) for index in range(len(nodes))
        ]
    for node, output in zip(nodes, outputs):
        replace(graph, node, output)


def multiply(product: Product, rows: torch.Tensor) -> Any:
    return product(rows)


def call_directly(graph: Graph) -> None:
    for node in graph.nodes:
        if node.target in DIRECT:
            node.target = DIRECT[node.target]
