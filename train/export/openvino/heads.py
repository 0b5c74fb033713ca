"""EAGLE-3 as OpenVINO GenAI reads it: a graph of one layer after `fc`, which GenAI moves to its
target, and a map of token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.export.layouts.eagle3_graphs import Reader, check_represented
from draftsmith.train.export.layouts.portable import check_eagle3
from draftsmith.train.export.layouts.source import ExportSource, check_sees_all, write_config
from draftsmith.train.export.openvino.graph import (
    JoinedPass,
    ModelShapes,
    allowed_places,
    library,
    traced,
    write_graph,
)
from draftsmith.train.export.openvino.lm import check_kind, write_target
from draftsmith.train.export.openvino.tokens import write_tokenizer

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
    check_eagle3(source)
    check_represented(source.drafter.portable_config(), READER)
    check_sees_all(source, READER.engine)
    check_kind(source.target, trust_remote_code=source.trust_remote_code)
    target = Target.load(
        source.target, dtype=torch.float32, trust_remote_code=source.trust_remote_code
    )
    head = Eagle3.load(source.draft, target).eval()
    check_embeddings(head, target)
    half = head.fc.weight.dtype != torch.float32
    head = head.float()
    shapes = ModelShapes.of(head.new_pool(1, 1, torch.device("cpu"), torch.float32))
    graph = traced(TracedHead(head, target), shapes, {STATES: head.fc.in_features})
    describe(graph, head)
    write_graph(graph, out, half=half)
    write_config(out, source.drafter.portable_config())
    write_tokenizer(source, out)
    write_target(source, out)


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
