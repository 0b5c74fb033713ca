"""A model's own forward, captured once as a graph of tensor operations that any number of tokens
can be run through.

The forward is not copied or rewritten: it runs once with stand-in tensors whose token count is a
symbol, and what it does is written down. Attention is one opaque operation of the graph that
calls the pass's own context, so the graph is independent of pools, windows of context and trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.kernels.attention.pool import Chunk, Scoring, size_of

CONTEXT = "attention_context"  # the graph's last input
# Any count will do but one: sizes of one are taken for constants.
NUM_TOKENS = 7

_library = torch.library.Library("draftsmith", "FRAGMENT")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scaling, int? window, bool "
    "chunked, float? softcap, Tensor? sinks)"
    " -> Tensor"
)
_attend = torch.ops.draftsmith.attend.default


_library.define("experts(Tensor rows, Tensor weights, Tensor ends) -> Tensor")
_experts = torch.ops.draftsmith.experts.default


def _attend_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


def _experts_shape(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[-1])


_library.impl("attend", _attend_shape, "Meta")
_library.impl("experts", _experts_shape, "Meta")


class _OpaqueExperts(TorchFunctionMode):
    """torch's stand-in for its grouped product of mixtures of experts takes bfloat16 alone; ours
    takes what the product does."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch._grouped_mm:
            return _experts(*args[:2], kwargs["offs"])
        return function(*args, **(kwargs or {}))


def experts(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Product of the rows of every expert with its weights, as the graph calls it."""
    return torch.nn.functional.grouped_mm(rows, weights, offs=ends)


class _Captured:
    """The `AttentionContext` of the capture."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        scaling, window, softcap, sinks = rule
        chunked, size = isinstance(window, Chunk), None if window is None else size_of(window)
        return _attend(query, key, value, layer, scaling, size, chunked, softcap, sinks)


def attend(
    context: AttentionContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float,
    window: int | None,
    chunked: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the pass's own context, as the graph calls it."""
    rule = Scoring(scaling, Chunk(window) if window and chunked else window, softcap, sinks)
    return context.attend(layer, query, key, value, rule)


def capture(function: Callable[..., Any], examples: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """The graph of `function(*examples, attention_context)`, whose inputs are the same and whose
    weights are its attributes.

    The dimension of size `NUM_TOKENS` of the examples is free afterwards, every other one is fixed.
    What the model decides by looking at values cannot be captured and raises.
    """

    def traced(*inputs: torch.Tensor) -> Any:
        with _OpaqueExperts():
            return function(*inputs, _Captured())

    # Cloned, because one tensor given twice would be captured as one input.
    inputs = [example.clone() for example in examples]
    with torch.no_grad():
        graph_module = make_fx(
            traced, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True
        )(*inputs)
    _check_free(graph_module.graph)
    _take_context(graph_module.graph)
    for node in graph_module.graph.find_nodes(op="call_function", target=_experts):
        node.target = experts
    return graph_module


def _check_free(graph: torch.fx.Graph) -> None:
    """A capture is of one branch: it must not have been chosen by the number of tokens."""
    given = next(node for node in graph.nodes if node.op == "placeholder").meta["val"]
    free = set().union(
        *(size.node.expr.free_symbols for size in given.shape if isinstance(size, torch.SymInt))
    )
    for guard in given.fake_mode.shape_env.guards:
        if guard.expr.free_symbols & free:
            raise ValueError(f"it does one thing or another by the number of tokens ({guard.expr})")


def _take_context(graph: torch.fx.Graph) -> None:
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last_input):
        context = graph.placeholder(CONTEXT)
    for node in graph.find_nodes(op="call_function", target=_attend):
        defaults = [
            argument.default_value for argument in _attend._schema.arguments[len(node.args) :]
        ]
        node.target, node.args = attend, (context, *node.args, *defaults)
