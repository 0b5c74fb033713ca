"""Rewriting of a captured forward for a GPU: the same numbers, to float rounding, in fewer
launches.

A layer of a few tokens is mostly launches, each of which costs more than its numbers. What lies
between products becomes Triton kernels, products of one input become one, and everything else stays
torch's. A layer like Llama's is nine launches then, of 40.

Weights of products of one input lie one behind the other, and the model's parameters become views
of that: no memory is held twice, and whatever is written into a parameter counts at once. Over a
paged pool one launch normalises and rotates queries and keys and writes keys and values where
attention reads them.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.nn.functional import linear

from draftsmith.drafters.compiled.capture import attend
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
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.paged_compiled import CompiledContext
from draftsmith.kernels.attention.pool import Chunk, Scoring
from draftsmith.kernels.products.row_steps_triton import (
    HeadNorms,
    WrittenKeys,
    add_normalise,
    gate,
    normalise,
    rotate,
    rotate_and_write,
)

aten = torch.ops.aten


def rewrite_for_device(module: GraphModule) -> list[JoinedLinear]:
    """Rewrites in place. Returns the holders of joined weights, the caller's to refresh."""
    graph = module.graph
    drop_no_operations(graph)
    merge_equal(graph)
    fuse_norms(graph, lambda *given: graph.call_function(normalise, given))
    for fuse in (fuse_sums, fuse_rotations):
        graph.eliminate_dead_code()
        fuse(graph)
    graph.eliminate_dead_code()
    fuse_gates(graph, lambda *given: graph.call_function(gate, given))
    graph.eliminate_dead_code()
    joined = join_linears(module)
    call_directly(graph)
    graph.eliminate_dead_code()
    return joined


def fuse_sums(graph: Graph) -> None:
    """A sum of states and the norm that reads it, as one call with both results."""
    for node in list(graph.find_nodes(op="call_function", target=normalise)):
        total, weight, *numbers = node.args
        if not _adds_states(total, node):
            continue
        with graph.inserting_before(total):
            # The weight may stand behind the sum.
            factor = weight and graph.node_copy(weight)
            call = graph.call_function(add_normalise, (*total.args, factor, *numbers))
            results = [graph.call_function(operator.getitem, (call, index)) for index in (0, 1)]
        replace(graph, node, results[1])
        replace(graph, total, results[0])


def _adds_states(total: Node, normed: Node) -> bool:
    if total.target is not aten.add.Tensor or total.kwargs or len(total.args) != 2:
        return False
    states = [stand_in(one) for one in total.args if isinstance(one, Node)]
    wanted = stand_in(normed)
    return len(states) == 2 and all(
        tuple(one.shape) == tuple(wanted.shape) and one.dtype == wanted.dtype for one in states
    )


def fuse_rotations(graph: Graph) -> None:
    """Attention of rotated heads, and their norms, as one call."""
    for node in list(graph.find_nodes(op="call_function", target=attend)):
        context, query, key, value, *rest = node.args
        parts = [rotation_parts(heads) for heads in (query, key)]
        if parts[0] is None or parts[1] is None or parts[0][1:] != parts[1][1:]:
            continue
        cosine, sine = parts[0][1:]
        heads = [part[0] for part in parts if part is not None]
        with graph.inserting_before(node):
            norms = _head_norms(graph, heads)
            if norms is not None:
                heads = [_unnormalised(graph, one) for one in heads]
            arguments = (context, *heads, value, cosine, sine, norms, *rest)
            fused = graph.call_function(attend_rotated, arguments)
        replace(graph, node, fused)


def _head_norms(graph: Graph, heads: list[Node]) -> tuple[Any, ...] | None:
    """The arguments of `attend_rotated` for norms of query and key that differ by weight alone."""
    norms = [_normalised(one) for one in heads]
    if norms[0] is None or norms[1] is None:
        return None
    (_, query_weight, *numbers), (_, key_weight, *others) = norms[0].args, norms[1].args
    if numbers != others or query_weight is None or key_weight is None:
        return None
    return (query_weight, key_weight, *numbers)


def _normalised(heads: Node) -> Node | None:
    """The norm of each head in `heads` [1, heads, T, D], before or after a transposition."""
    if heads.target is aten.transpose.int and heads.args[1:] == (1, 2):
        heads = heads.args[0]
    return heads if heads.target is normalise and stand_in(heads).ndim == 4 else None


def _unnormalised(graph: Graph, heads: Node) -> Node:
    if heads.target is normalise:
        return heads.args[0]
    return graph.call_function(aten.transpose.int, (heads.args[0].args[0], 1, 2))


def join_linears(module: GraphModule) -> list[JoinedLinear]:
    """Linears of one input become one multiplication. A weight that is read in several places
    stays where it is."""
    weights: dict[Node, torch.Tensor] = {}
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        if node.args[1].op == "get_attr":
            weights[node] = tensor(module, node.args[1])
    reads = Counter(map(id, weights.values()))
    groups: dict[Node, list[Node]] = defaultdict(list)
    for node, weight in weights.items():
        if reads[id(weight)] == 1 and joinable(weight):
            groups[node.args[0]].append(node)
    joined = []
    for index, group in enumerate(groups.values()):
        parts = [weights[node] for node in group]
        if len(group) > 1 and len({part.dtype for part in parts}) == 1:
            product = JoinedLinear(parts, [bias_of(module, node) for node in group])
            join(module, f"_joined{index}", group[0].args[0], group, product)
            joined.append(product)
    return joined


# Weights of query and key, then the numbers of `Norm`.
Norms = tuple[torch.Tensor, torch.Tensor, float, float, bool]


def attend_rotated(
    context: AttentionContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    norms: Norms | None,
    layer: int,
    scaling: float,
    window: int | None,
    chunked: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`capture.attend` of heads that are not yet normalised, where `norms` says so, and rotated."""
    if type(context) is not PagedPass or isinstance(context.context, CompiledContext):
        query, key = _rotated(query, key, cosine, sine, norms)
        return attend(context, query, key, value, layer, scaling, window, chunked, softcap, sinks)
    keys, values = context.pool.keys[layer], context.pool.values[layer]
    written = WrittenKeys(key, value, keys, values, context.slots)
    head_norms = None if norms is None else HeadNorms(*norms)
    query = rotate_and_write(query, written, cosine, sine, head_norms)
    rule = Scoring(scaling, Chunk(window) if window and chunked else window, softcap, sinks)
    return context.context.attend(query, keys, values, rule).unsqueeze(0)


def _rotated(
    query: torch.Tensor,
    key: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    norms: Norms | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    query_weight, key_weight, *numbers = norms or (None, None)
    return (
        rotate(query, cosine, sine, query_weight, *numbers),
        rotate(key, cosine, sine, key_weight, *numbers),
    )


class JoinedLinear:
    """`weights` are `[out_i, in]` of one dtype, `biases` their `[out_i]` or None. The tensors stay
    the caller's objects, their memory becomes part of the joined one's. `refresh` joins anew what
    was given other memory since."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]):
        self.weights, self.biases = list(weights), list(biases)
        self.sizes = [len(weight) for weight in weights]
        self._weight = joined(self.weights)
        self._bias = self._joined_bias()

    def refresh(self) -> bool:
        """False where nothing was given other memory."""
        moved = not _follow(self.weights, self._weight)
        if moved:
            self._weight = joined(self.weights)
        given = [bias for bias in self.biases if bias is not None]
        if self._bias is not None and any(not _within(bias, self._bias) for bias in given):
            self._bias, moved = self._joined_bias(), True
        return moved

    @torch.inference_mode(False)
    def _joined_bias(self) -> torch.Tensor | None:
        if all(bias is None for bias in self.biases):
            return None
        whole = self._weight.new_zeros(len(self._weight))
        for part, bias in zip(whole.split(self.sizes), self.biases):
            if bias is not None:
                bias.data = part.copy_(bias.detach())
        return whole

    def __call__(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """[..., in] -> [..., out_i] of every weight, views of one tensor."""
        return torch.split_with_sizes(linear(rows, self._weight, self._bias), self.sizes, -1)


def joinable(weight: torch.Tensor) -> bool:
    """True for plain weights of numbers: no quantised, sharded or otherwise special tensor."""
    plain = type(weight) in (torch.Tensor, nn.Parameter)
    return plain and weight.ndim == 2 and weight.is_floating_point()


# Not as tensors of inference: parameters are written in place outside of it too.
@torch.inference_mode(False)
def joined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """All rows of `weights` as one tensor, of which each becomes a view; nothing is copied where
    they lie one behind the other already."""
    first = weights[0].detach()
    shape = (sum(len(weight) for weight in weights), first.shape[1])
    end = first.storage_offset() + shape[0] * shape[1]
    if end * first.element_size() <= first.untyped_storage().nbytes():
        there = first.as_strided(shape, (shape[1], 1))
        if _follow(weights, there):
            return there
    whole = torch.cat([weight.detach() for weight in weights])
    begin = 0
    for weight in weights:
        weight.data = whole[begin : begin + len(weight)]
        begin += len(weight)
    return whole


def _follow(weights: Sequence[torch.Tensor], whole: torch.Tensor) -> bool:
    """True where the rows of `weights` are those of `whole`, in order, in its memory."""
    place = whole.data_ptr()
    for weight in weights:
        if weight.data_ptr() != place or not weight.is_contiguous():
            return False
        place += weight.numel() * weight.element_size()
    return True


def _within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
