"""Stateful graphs for OpenVINO GenAI (2026.4), traced from the modules that serve here: a draft LM,
the target of any draft, EAGLE-3. A graph of tokens, mask and positions keeps its keys and values in
variables.

B rows, T tokens of a pass, P tokens of earlier passes, N = P + T.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters.target.load import load_config, load_model, load_tokenizer
from draftsmith.drafters.target.probe import check_model
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import read_config
from draftsmith.errors import UserError, first_line, missing
from draftsmith.kernels.attention.pool import PagedPool, Scoring
from draftsmith.train.export import portable
from draftsmith.train.export.portable import Reader, check_eagle3, check_represented
from draftsmith.train.export.source import (
    ExportSource,
    check_sees_all,
    copy_tokenizer,
    write_config,
)

TARGET = "target"  # folder of the target beside a draft
# Kinds whose graph is tested; a trace would keep one branch of what depends on its input.
KINDS = ("llama", "mistral", "qwen2", "qwen3")


def write_lm(source: ExportSource, out: Path) -> None:
    portable.check_lm(source)
    write_model(source.draft, source, out)


def write_target(source: ExportSource, out: Path) -> None:
    (out / TARGET).mkdir()
    write_model(source.target, source, out / TARGET)


def write_model(folder: Path, source: ExportSource, out: Path) -> None:
    """The causal LM in `folder`, with the target's tokenizer."""
    check_kind(folder, trust_remote_code=source.trust_remote_code)
    own = load_model(folder, trust_remote_code=source.trust_remote_code)
    half = own.dtype != torch.float32
    lm = CausalLM(own.float(), str(folder), check_model)
    if lm.rope_limit is not None:
        raise UserError(
            f"{str(folder)!r} has rotary embeddings that depend on the length of a text, which "
            "draftsmith does not write to OpenVINO; convert the model with optimum-intel"
        )
    graph = traced(TracedLm(lm), shapes_of(lm.new_pool(1, 1)), {})
    write_graph(graph, out, half=half)
    write_config(out, read_config(folder))
    write_tokenizer(source, out)


def check_kind(folder: Path, *, trust_remote_code: bool) -> None:
    kind = load_config(folder, trust_remote_code=trust_remote_code).model_type
    if kind not in KINDS:
        raise UserError(
            f"{str(folder)!r} is of kind {kind!r}, and draftsmith writes {', '.join(KINDS)} to "
            "OpenVINO; convert the model with optimum-intel"
        )


class TracedLm(nn.Module):
    """Its module names are transformers' own: GenAI finds the states of layers by them."""

    def __init__(self, lm: CausalLM):
        super().__init__()
        self.model = lm.model
        self.lm = lm

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        allowed = allowed_places(attention_mask, input_ids.shape[1])
        context = JoinedPass(past, allowed)
        final = self.lm.paged(input_ids, position_ids, context).final
        return self.lm.own_head(final), *context.states


FILES = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")


def write_tokenizer(source: ExportSource, out: Path) -> None:
    """The target's tokenizer: one graph for each direction."""
    tokenizers = library("openvino_tokenizers")
    tokenizer = load_tokenizer(source.target, trust_remote_code=source.trust_remote_code)
    try:
        graphs = tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    except Exception as error:
        raise UserError(
            f"the tokenizer of {str(source.target)!r} is not one that openvino_tokenizers "
            f"converts ({first_line(error)}); export the draft --to vllm"
        ) from error
    for graph, name in zip(graphs, FILES, strict=True):
        write_graph(graph, out, name=name, half=False)
    copy_tokenizer(source.target, out)


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
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        for name, given in zip(("a window", "a cap", "sinks"), rule[1:]):
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
            scale=rule.scaling,
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


# (kv_heads, dim) of the keys and of the values of each layer in turn.
Shapes = list[tuple[int, int]]


def shapes_of(pool: PagedPool) -> Shapes:
    """`pool` has tensors [slots, kv_heads, dim]."""
    pairs = zip(pool.keys, pool.values, strict=True)
    return [(one.shape[1], one.shape[2]) for pair in pairs for one in pair]


def traced(module: nn.Module, shapes: Shapes, more: dict[str, int]) -> Any:
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
        *(torch.zeros(rows, heads, past, width) for heads, width in shapes),
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a trace says of Python's own branches
        module(*example)  # raises `UserError` where tracing would hide it
        graph = ov.convert_model(module, example_input=example)
    name_and_shape(graph, [*INPUTS, *more], shapes)
    keep_states(graph, len(INPUTS) + len(more), len(shapes))
    return graph


def name_and_shape(graph: Any, names: Sequence[str], shapes: Shapes) -> None:
    ov = library()
    states = [
        f"past_key_values.{at // 2}.{'value' if at % 2 else 'key'}" for at in range(len(shapes))
    ]
    sizes = [*([-1] * (2 if name in INPUTS else 3) for name in names)]
    sizes += [[-1, heads, -1, width] for heads, width in shapes]
    for port, name, size in zip(graph.inputs, [*names, *states], sizes, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        port.get_node().set_partial_shape(ov.PartialShape(size))
    present = [name.replace("past_key_values", "present") for name in states]
    for port, name in zip(graph.outputs, ["logits", *present], strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()


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


def write_graph(graph: Any, folder: Path, *, half: bool, name: str = MODEL) -> None:
    """`half` weights are stored in float16, which holds those of 16-bit checkpoints."""
    try:
        library().save_model(graph, folder / name, compress_to_fp16=half)
    except RuntimeError as error:
        raise OSError(f"{name}: {first_line(error)}") from error


READER = Reader(
    "OpenVINO GenAI",
    passes_over={
        "norm_output": "it would feed the state back without its norm and lose later depths",
        "fc_norm": "it joins the taps itself and has no norms for them",
        "norm_before_fc": "it joins the taps itself and has no norm for them",
    },
    single="feeds back the state of the first",
)
STATES = "hidden_states"


def write_eagle3(source: ExportSource, out: Path) -> None:
    """A graph of one layer after `fc`, which GenAI moves to its target, and a map of token ids."""
    check_eagle3(source)
    check_represented(source.drafter.portable_config(), READER)
    check_sees_all(source, READER.engine)
    check_kind(source.target, trust_remote_code=source.trust_remote_code)
    target = load_target(
        str(source.target),
        dtype=torch.float32,
        device="cpu",
        trust_remote_code=source.trust_remote_code,
    )
    head = Eagle3.load(source.draft, target).eval()
    check_embeddings(head, target)
    half = head.fc.weight.dtype != torch.float32
    head = head.float()
    shapes = shapes_of(head.new_pool(1, 1, torch.device("cpu"), torch.float32))
    graph = traced(TracedHead(head, target), shapes, {STATES: head.fc.in_features})
    describe(graph, head)
    write_graph(graph, out, half=half)
    write_config(out, source.drafter.portable_config())
    write_tokenizer(source, out)


def check_embeddings(head: Eagle3, target: Target) -> None:
    own = head.embed_tokens
    if own is not None and not torch.equal(own.weight.float(), table_of(target).weight):
        raise UserError(
            "the draft has embeddings of its own, and OpenVINO GenAI gives it the target's; "
            "export it --to vllm"
        )


def table_of(target: Target) -> nn.Embedding:
    return target.model.get_input_embeddings()


def describe(graph: Any, head: Eagle3) -> None:
    """Adds what GenAI looks for: the mode, the layers whose outputs are the taps, and the offsets
    from draft to target ids as a constant output."""
    ops = library("openvino.opset13")
    graph.set_rt_info("True", ["eagle3_mode"])
    graph.set_rt_info(" ".join(str(tap - 1) for tap in head.taps), ["hidden_layers_list"])
    if head.d2t is not None:
        offsets = ops.constant(head.d2t.numpy(), name="d2t")
        result = ops.result(offsets, name="d2t_result")
        result.output(0).get_tensor().set_names({"d2t"})
        graph.add_results([result])
        graph.validate_nodes_and_infer_types()


class TracedHead(nn.Module):
    """GenAI finds `fc` behind the input of states, and the state to feed back by the name
    `midlayer`."""

    def __init__(self, head: Eagle3, target: Target):
        super().__init__()
        self.head = head
        self.embed_tokens = table_of(target)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        context = JoinedPass(past, allowed_places(attention_mask, input_ids.shape[1]))
        embeds, states = self.embed_tokens(input_ids), self.head.fc(hidden_states)
        step = self.head.step(embeds, states, position_ids, context)
        return self.head.lm_head(step.head_input), *context.states
