"""A captured and rewritten forward as a plain function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, getitem
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from draftsmith.drafters.compiled.capture import capture
from draftsmith.drafters.compiled.joined_linear import JoinedLinear
from draftsmith.drafters.compiled.one_call import one_call
from draftsmith.drafters.compiled.packed_linear import PackedLinear
from draftsmith.drafters.compiled.patterns import Product, multiply
from draftsmith.drafters.compiled.rewrite import rewrite
from draftsmith.drafters.target.attention import AttentionContext

_version = attrgetter("_version")


class Replay:
    """`replay(*inputs, attention_context)` gives what the captured function gave, without its
    Python.

    Weights are the model's own tensors, so that new values copied into them count; `refresh` says
    that this happened. `copies`: see `rewrite`. `steps` between products are those for a CPU or
    Triton's; see `captured.steps_for`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        examples: Sequence[torch.Tensor],
        *,
        copies: int = 2,
        steps: Literal["cpu", "triton"] = "cpu",
    ):
        module = capture(function, examples)
        self._packed: Sequence[PackedLinear | JoinedLinear]  # laid out again by `refresh`
        if steps == "cpu":
            self._packed = rewrite(module, copies=copies)
        else:
            from draftsmith.drafters.compiled.device_rewrite import rewrite_for_device

            self._packed = rewrite_for_device(module)
        held = [tensor for one in self._packed for tensor in (*one.weights, *one.biases)]
        self._weights = [tensor for tensor in held if tensor is not None]
        self._versions: list[int] = []
        constants = _lift_constants(module)
        self._constants = list(constants.values())
        module.recompile()
        self.graph = module.graph
        self._run = module.forward
        self._product = _only_product(module.graph, constants)
        self._one_call = one_call(module.graph, constants) if steps == "cpu" else None

    def __call__(
        self, *inputs: torch.Tensor, attention_context: AttentionContext | None = None
    ) -> Any:
        if self._product is not None:
            return self._product(inputs[0])[0]
        if self._one_call is not None:
            found = self._one_call(inputs, attention_context)
            if found is not None:
                return found
        return self._run(*inputs, attention_context, *self._constants)

    def refresh(self) -> None:
        if self._one_call is not None:
            versions = list(map(_version, self._weights))
            if versions == self._versions:
                return
            self._versions = versions
        for packed in self._packed:
            packed.refresh()
        if self._one_call is not None:
            self._one_call.refresh()


def _only_product(graph: Graph, constants: dict[Node, Any]) -> Product | None:
    """The product of the first input that a head is; None where there is more to do."""
    done = [node for node in graph.nodes if node.op == "call_function"]
    first, last = next(iter(graph.nodes)), done[-1] if done else None
    (outputs,) = next(node for node in graph.nodes if node.op == "output").args
    if [node.target for node in done] != [multiply, getitem] or outputs is not last:
        return None
    product, rows = done[0].args
    return constants[product] if rows is first and last.args == (done[0], 0) else None


def _lift_constants(module: GraphModule) -> dict[torch.fx.Node, Any]:
    """Attributes of a module are slow to read: they become its last inputs, given every
    time."""
    graph = module.graph
    nodes: dict[str, torch.fx.Node] = {}
    constants: dict[torch.fx.Node, Any] = {}
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        if node.target not in nodes:
            value: Any = module
            for part in node.target.split("."):
                value = getattr(value, part)
            with graph.inserting_after(last_input):
                last_input = graph.placeholder(f"constant_{len(constants) + 1}")
            nodes[node.target], constants[last_input] = last_input, value
        node.replace_all_uses_with(nodes[node.target])
        graph.erase_node(node)
    return constants
