"""OpenVINO GenAI's reading of an export (2026.4): the graph runs as it stands, in passes that its
variables join; of an EAGLE-3 head, `fc` is taken out and the state to feed back is led out.

The draft's rounds are played with the graph in the place of the checkpoint's modules. T tokens of
a text, H hidden width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch

from draftsmith.drafters.autoregressive.chain import draft_from
from draftsmith.drafters.autoregressive.draft_sampler import DraftSampler
from draftsmith.drafters.autoregressive.state import DraftPrefill, HeadStep
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.train.export.openvino import MODEL
from draftsmith.train.export.source import text_config

NAME = "OpenVINO GenAI"
STATES, FED_BACK = "hidden_states", "last_hidden_state"
INPUTS = {"input_ids", "attention_mask", "position_ids", "beam_idx"}
# Weights as exact as they are stored, whatever the machine would choose.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def read_draft_lm(folder: Path, target_config: dict[str, Any]) -> GraphLm:
    graph = opened(folder, INPUTS)
    expected = text_config(target_config)["vocab_size"]
    if width_of(graph) != expected:
        raise UserError(
            f"{NAME} reads a draft with {width_of(graph)} token ids for a target with {expected}; "
            "the layout is wrong"
        )
    return GraphLm(graph, expected)


def read_eagle3(folder: Path, target_config: dict[str, Any]) -> GraphHead:
    graph, target = opened(folder, INPUTS | {STATES}), text_config(target_config)
    mode, layers = (setting(graph, key) for key in ("eagle3_mode", "hidden_layers_list"))
    taps = tuple(int(layer) + 1 for layer in layers.split())
    outside = [tap for tap in taps if not 1 <= tap <= target["num_hidden_layers"]]
    if mode != "True" or len(taps) != 3 or outside:
        raise UserError(
            f"{NAME} drafts with EAGLE-3 by eagle3_mode and three layers of its target, and the "
            f"export says {mode!r} and {layers!r}; the layout is wrong"
        )
    fc, offsets = without_fc(graph), without_offsets(graph)
    lead_out_state(graph)
    graph.validate_nodes_and_infer_types()
    ids = None if offsets is None else torch.arange(len(offsets)) + offsets
    if (ids is None and width_of(graph) != target["vocab_size"]) or (
        ids is not None and len(ids) != width_of(graph)
    ):
        raise UserError(
            f"{NAME} finds no target ids for the {width_of(graph)} tokens of the draft; the layout "
            "is wrong"
        )
    return GraphHead(graph, target["vocab_size"], taps, fc, ids)


def read_graph(folder: Path) -> Any:
    from openvino import Core

    return Core().read_model(folder / MODEL)


def opened(folder: Path, inputs: set[str]) -> Any:
    """The graph; raises for inputs that the engine would not fill, or states that it would not
    find."""
    graph = read_graph(folder)
    found = {port.get_any_name() for port in graph.inputs}
    if found != inputs or not graph.get_sinks():
        raise UserError(
            f"{NAME} fills the inputs {', '.join(sorted(inputs))} of a graph with variables, and "
            f"the export has {', '.join(sorted(found))} and {len(graph.get_sinks())} variables; "
            "the layout is wrong"
        )
    return graph


def setting(graph: Any, key: str) -> str:
    return graph.get_rt_info([key]).astype(str) if graph.has_rt_info([key]) else ""


def width_of(graph: Any) -> int:
    return graph.output("logits").get_partial_shape()[2].get_length()


def kind(port: Any) -> str:
    return port.get_node().get_type_name()


def without_fc(graph: Any) -> torch.Tensor:
    """Weight [H, 3 * target's H] of the product behind the states, which moves to the target."""
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "MatMul" and kind(node.input_value(0)) == "Parameter":
            source = node.input_value(0)
            if STATES in source.get_node().get_friendly_name():
                for consumer in node.output(0).get_target_inputs():
                    consumer.replace_source_output(source)
                return numbers(node.input_value(1).get_node())
    raise UserError(f"{NAME} finds no fc behind {STATES}; the layout is wrong")


def numbers(node: Any) -> torch.Tensor:
    """Values of a constant, decompressed."""
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
    return torch.tensor(node.data).float()


def without_offsets(graph: Any) -> torch.Tensor | None:
    for result in graph.get_results():
        source = result.input_value(0)
        if kind(source) == "Constant" and "d2t" in source.get_node().get_friendly_name():
            graph.remove_result(result)
            return torch.tensor(source.get_node().data)
    return None


def lead_out_state(graph: Any) -> None:
    """The sum after the layer's MLP becomes an output."""
    from openvino import opset13

    for node in graph.get_ordered_ops():
        if node.get_type_name() != "Add" or "midlayer" not in node.get_friendly_name():
            continue
        added = node.input_value(1)
        if kind(added) == "MatMul" and kind(added.get_node().input_value(0)) == "Multiply":
            result = opset13.result(node)
            result.output(0).get_tensor().set_names({FED_BACK})
            graph.add_results([result])
            return
    raise UserError(f"{NAME} finds no state of a midlayer to feed back; the layout is wrong")


class GraphLm:
    """A draft LM whose passes the engine's graph makes, one text at a time."""

    family = "draft-lm"
    taps: tuple[int, ...] = ()
    vocab_map: torch.Tensor | None = None
    ahead = 1

    def __init__(self, graph: Any, vocab_size: int):
        from openvino import Core

        self.request = Core().compile_model(graph, "CPU", EXACT).create_infer_request()
        self.vocab_size = vocab_size
        # Tokens read so far of each row, by its first block.
        self.texts: dict[int, list[int]] = {}

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool:
        """Places of the rows' tokens; keys and values are the graph's."""
        empty = [torch.zeros(num_blocks * block_size, 1, 1, device=device, dtype=dtype)]
        return PagedPool(empty, list(empty), block_size)

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        sampler = DraftSampler(inputs, vocab_size=self.vocab_size, vocab_map=self.vocab_map)
        rows = self.read_texts(inputs)
        if rows:
            tables = inputs.block_tables[rows]
            last = torch.tensor([len(inputs.histories[row]) for row in rows]) - self.ahead
            _, depths = sampler.plan(rows).sent(tables.device)
            index = torch.tensor(rows)
            prefill = DraftPrefill(
                rows, index, inputs.num_draft[index], last, tables, self.at_end(tables)
            )
            if depths:
                draft_from(self, inputs, prefill, depths, sampler, None)
        return sampler.proposal()

    def read_texts(self, inputs: DraftInputs) -> list[int]:
        """Takes up what is committed; returns the rows that can draft."""
        for table, text in zip(inputs.block_tables, inputs.histories):
            self.texts[int(table[0])] = list(text)
        return list(range(len(inputs.histories)))

    def read_drafts(
        self, tokens: torch.Tensor, hidden: torch.Tensor, context: PagedPass
    ) -> HeadStep:
        tables = context.layout.block_tables
        for table, token, state in zip(tables, tokens.tolist(), hidden):
            self.add(int(table[0]), token, state)
        return self.at_end(tables)

    def add(self, row: int, token: int, state: torch.Tensor) -> None:
        self.texts[row].append(token)

    def at_end(self, tables: torch.Tensor) -> HeadStep:
        found = [self.run(int(table[0])) for table in tables]
        logits = torch.stack([one["logits"] for one in found])
        return HeadStep(torch.stack([one.get(FED_BACK, one["logits"]) for one in found]), logits)

    def run(self, row: int) -> dict[str, torch.Tensor]:
        """Outputs at the last token. All others are read in a pass before, so that the last one
        finds states in the variables."""
        self.request.reset_state()
        length = len(self.texts[row])
        if length > 1:
            self.request.infer(self.fed(row, 0, length - 1))
        found = self.request.infer(self.fed(row, length - 1, length))
        return {port.get_any_name(): torch.tensor(value)[0, -1] for port, value in found.items()}

    def fed(self, row: int, begin: int, end: int) -> dict[str, Any]:
        return {
            "input_ids": numpy.array([self.texts[row][begin:end]]),
            "attention_mask": numpy.ones((1, end), dtype=numpy.int64),
            "position_ids": numpy.arange(begin, end)[None],
            "beam_idx": numpy.zeros(1, dtype=numpy.int32),
        }

    def draft_logits(self, head_input: torch.Tensor) -> torch.Tensor:
        return head_input

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        return last + 1


class GraphHead(GraphLm):
    """An EAGLE-3 head likewise, which reads at each place a state [H] and the token after it."""

    family = "eagle3"
    ahead = 2

    def __init__(
        self,
        graph: Any,
        vocab_size: int,
        taps: tuple[int, ...],
        fc: torch.Tensor,
        ids: torch.Tensor | None,
    ):
        super().__init__(graph, vocab_size)
        self.taps, self.fc, self.vocab_map = taps, fc, ids
        self.states: dict[int, list[torch.Tensor]] = {}

    def read_texts(self, inputs: DraftInputs) -> list[int]:
        rows, begin = [], 0
        for row, text in enumerate(inputs.histories):
            key, start = int(inputs.block_tables[row, 0]), int(inputs.starts[row])
            count = int(inputs.lengths[row]) - 1
            if count and inputs.taps is not None:
                new = inputs.taps[begin : begin + count].float() @ self.fc.T
                self.texts[key] = list(text[1:])
                self.states[key] = [*self.states.get(key, [])[:start], *new]
                rows.append(row)
            begin += count
        return rows

    def add(self, row: int, token: int, state: torch.Tensor) -> None:
        super().add(row, token, state)
        self.states[row].append(state)

    def fed(self, row: int, begin: int, end: int) -> dict[str, Any]:
        states = torch.stack(self.states[row][begin:end])[None]
        return {**super().fed(row, begin, end), STATES: states.numpy()}

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        return last
