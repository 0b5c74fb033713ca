"""A decoder as OpenVINO GenAI runs it: a graph of tokens, mask and positions that keeps its keys
and values in variables.

B rows, T tokens of a pass, P tokens of earlier passes, N = P + T.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.errors import UserError
from draftsmith.extras import missing
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.attention.window import Window

MODEL = "openvino_model.xml"
# What GenAI feeds; its continuous batching gives positions and takes the mask and `beam_idx` out.
INPUTS = ("input_ids", "attention_mask", "position_ids")
BEAMS = "beam_idx"
EXAMPLE_ROWS, EXAMPLE_PAST, EXAMPLE_TOKENS = 2, 5, 3


def library(module: str = "openvino") -> ModuleType:
    """`openvino`, or one of the packages that come with it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing("export --to openvino", module, "openvino") from error


class JoinedPass:
    """The `AttentionContext` of a traced pass: keys and values of earlier passes, those of this one
    behind them."""

    def __init__(self, past: Sequence[torch.Tensor], allowed: torch.Tensor):
        """`past`: keys, values [B, kv_heads, P, dim] of every layer in turn; `allowed` [B, 1, T, N]
        bool."""
        self.states = list(past)
        self.bias = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: Window | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        for name, given in (("a window", sliding_window), ("a cap", softcap), ("sinks", sinks)):
            if given is not None:
                raise UserError(
                    f"layer {layer} attends with {name}, which draftsmith does not write to "
                    "OpenVINO; convert the model with optimum-intel"
                )
        keys, values = (
            torch.cat([past, new], dim=2)
            for past, new in zip(self.states[2 * layer : 2 * layer + 2], (key, value))
        )
        self.states[2 * layer : 2 * layer + 2] = [keys, values]
        out = scaled_dot_product_attention(
            query,
            repeated(keys, query.shape[1]),
            repeated(values, query.shape[1]),
            attn_mask=self.bias,
            scale=scaling,
        )
        return out.transpose(1, 2)


def repeated(states: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, kv_heads, N, dim] -> [B, heads, N, dim], in the operations that OpenVINO's paged
    attention reads as grouped heads."""
    rows, own, length, width = states.shape
    if own == heads:
        return states
    return (
        states[:, :, None]
        .expand(rows, own, heads // own, length, width)
        .reshape(rows, heads, length, width)
    )


def allowed_places(attention_mask: torch.Tensor, num_tokens: int | torch.Tensor) -> torch.Tensor:
    """[B, N] of 0 and 1 -> [B, 1, T, N] bool: real tokens up to each of the last T."""
    total = attention_mask.shape[1]
    places = torch.arange(total)
    causal = places[None] <= places[total - num_tokens :, None]
    return causal[None, None] & (attention_mask[:, None, None] > 0)


class ModelShapes(NamedTuple):
    """Keys and values of the layers: (kv_heads, dim) each, in turn."""

    states: list[tuple[int, int]]

    @classmethod
    def of(cls, pool: PagedPool) -> ModelShapes:
        """`pool` has tensors [slots, kv_heads, dim]."""
        pairs = zip(pool.keys, pool.values, strict=True)
        return cls([(one.shape[1], one.shape[2]) for pair in pairs for one in pair])


def traced(module: nn.Module, shapes: ModelShapes, more: dict[str, int]) -> Any:
    """The graph of `module`, called with `INPUTS`, `more` states [B, T, width] by name, and the
    keys and values of every layer; it returns its logits [B, T, V] and them."""
    ov = library()
    rows, past, tokens = EXAMPLE_ROWS, EXAMPLE_PAST, EXAMPLE_TOKENS
    positions = torch.arange(past, past + tokens)[None].expand(rows, -1)
    example = (
        torch.ones(rows, tokens, dtype=torch.int64),
        torch.ones(rows, past + tokens, dtype=torch.int64),
        positions,
        *(torch.zeros(rows, tokens, width) for width in more.values()),
        *(torch.zeros(rows, heads, past, width) for heads, width in shapes.states),
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a trace says of Python's own branches
        module(*example)  # raises `UserError` where tracing would hide it
        graph = ov.convert_model(module, example_input=example)
    name_and_shape(graph, [*INPUTS, *more], shapes)
    keep_states(graph, len(INPUTS) + len(more), len(shapes.states))
    return graph


def name_and_shape(graph: Any, names: Sequence[str], shapes: ModelShapes) -> None:
    ov = library()
    states = [f"past_key_values.{at // 2}.{'value' if at % 2 else 'key'}" for at in indices(shapes)]
    sizes = [*([-1] * (2 if name in INPUTS else 3) for name in names)]
    sizes += [[-1, heads, -1, width] for heads, width in shapes.states]
    for port, name, size in zip(graph.inputs, [*names, *states], sizes, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        port.get_node().set_partial_shape(ov.PartialShape(size))
    present = [name.replace("past_key_values", "present") for name in states]
    for port, name in zip(graph.outputs, ["logits", *present], strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()


def indices(shapes: ModelShapes) -> range:
    return range(len(shapes.states))


def keep_states(graph: Any, first: int, count: int) -> None:
    """Turns the last `count` inputs and outputs into variables, which begin empty and are reordered
    by `BEAMS` before each pass."""
    ov, ops, passes = library(), library("openvino.opset13"), library("openvino.passes")
    inputs, outputs = list(graph.inputs)[first:], list(graph.outputs)[-count:]
    beams = ops.parameter(ov.PartialShape([-1]), ov.Type.i32, BEAMS)
    beams.output(0).get_tensor().set_names({BEAMS})
    graph.add_parameters([beams])
    for port in inputs:
        consumers = port.get_target_inputs()
        ordered = ops.gather(port, beams, ops.constant(0, ov.Type.i64))
        for consumer in consumers:
            consumer.replace_source_output(ordered.output(0))
    pairs = {past.get_any_name(): now.get_any_name() for past, now in zip(inputs, outputs)}
    manager = passes.Manager()
    manager.register_pass(passes.MakeStateful(pairs))
    manager.run_passes(graph)
    begin_empty(graph)


def begin_empty(graph: Any) -> None:
    """Every variable starts with as many rows as the batch has, and no places."""
    ov, ops = library(), library("openvino.opset13")
    shape = ops.shape_of(graph.input(INPUTS[0]), ov.Type.i64)
    rows = ops.gather(shape, ops.constant([0], ov.Type.i64), ops.constant(0, ov.Type.i64))
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, width = (size.min_length for size in node.get_output_partial_shape(0))
            size = [rows, *(ops.constant([n], ov.Type.i64) for n in (heads, 0, width))]
            kind = node.get_output_element_type(0)
            node.set_arguments([ops.broadcast(ops.constant(0.0, kind), ops.concat(size, 0))])
    graph.validate_nodes_and_infer_types()


def write_graph(graph: Any, folder: Path, *, half: bool) -> None:
    """`half` weights are stored in float16, which holds those of 16-bit checkpoints."""
    library().save_model(graph, folder / MODEL, compress_to_fp16=half)
