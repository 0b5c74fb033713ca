"""Causal LMs as graphs: a draft LM, and the target of any draft."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.load import load_config, load_model
from draftsmith.drafters.target.probe import check_model
from draftsmith.drafters.weights import read_config
from draftsmith.errors import UserError
from draftsmith.train.export.layouts import plain
from draftsmith.train.export.layouts.source import ExportSource, write_config
from draftsmith.train.export.openvino.graph import (
    JoinedPass,
    ModelShapes,
    allowed_places,
    traced,
    write_graph,
)
from draftsmith.train.export.openvino.tokens import write_tokenizer

TARGET = "target"  # folder of the target beside a draft
# Kinds whose graph is tested; a trace would keep one branch of what depends on its input.
KINDS = ("llama", "mistral", "qwen2", "qwen3")


def write_lm(source: ExportSource, out: Path) -> None:
    plain.check(source)
    write_model(source.draft, source, out)
    write_target(source, out)


def write_target(source: ExportSource, out: Path) -> None:
    if source.with_target:
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
    graph = traced(TracedLm(lm), ModelShapes.of(lm.new_pool(1, 1)), {})
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
