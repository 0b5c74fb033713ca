"""Graphs for OpenVINO GenAI: what they compute, what is refused, and the target beside the draft."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import read_weights, write_weights
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.command import open_source
from draftsmith.train.export.source import ExportSource
from tests.conftest import small_files
from tests.unit.drafters.target.test_finite import broken
from tests.unit.train.export import conftest
from tests.unit.train.export.conftest import saved

pytest.importorskip("openvino_genai", reason="the extra [openvino] is not installed")

from draftsmith.train.export.openvino import (
    MODEL,
    READER,
    TARGET,
    library,
    write_eagle3,
    write_graph,
)
from draftsmith.train.export.portable import check_represented

# Numbers as exact as the weights; threads of its own would wait for the cores of other tests.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}

BIN = "openvino_model.bin"
EAGLE3: dict[str, Any] = {"taps": (1, 2, 3), "draft_vocab_size": 100}


@pytest.fixture
def made(tiny_target: Callable[..., str], tmp_path: Path) -> Callable[..., Path]:
    """`made(kind)` is the folder of a draft LM of two layers of that kind of target; other options
    and families by name."""

    def draft(kind: str = "llama", family: str = "draft-lm", **options: Any) -> Path:
        target = Target.load(tiny_target(kind), dtype=torch.float32)
        chosen = options or {"target_layers": (0, 3)}
        return saved(family, target, tmp_path / "draft", noise=0.0, **chosen)

    return draft


export = partial(conftest.export, to="openvino")


def source_of(draft: Path) -> ExportSource:
    return open_source(ExportConfig(draft=str(draft), to="openvino", out="unused"))


def test_a_graph_without_room_is_an_error_of_the_disk(tmp_path: Path) -> None:
    graph = library().Model([library("openvino.opset13").constant(numpy.ones(999))], [])
    with small_files(200), pytest.raises(OSError, match=MODEL):
        write_graph(graph, tmp_path, half=False)


def test_a_target_of_lost_weights_is_refused(
    made: Callable[..., Path], tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    lost = broken(tiny_target("llama"), tmp_path / "lost", "lm_head.weight", float("nan"))
    source = source_of(made(family="eagle3", **EAGLE3))
    with pytest.raises(UserError, match=r"NaN or infinite weights, first in row 7"):
        write_eagle3(dataclasses.replace(source, target=Path(lost)), tmp_path / "out")


def computed(folder: Path, ids: torch.Tensor, mask: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Logits of the graph, [B, L, V], read in passes that end at `cuts`."""
    core = library().Core()
    compiled = core.compile_model(core.read_model(folder / MODEL), "CPU", EXACT)
    request, found = compiled.create_infer_request(), []
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for begin, end in zip([0, *cuts], cuts):
        passed = {
            "input_ids": ids[:, begin:end],
            "attention_mask": mask[:, :end],
            "position_ids": positions[:, begin:end],
            "beam_idx": torch.arange(len(ids), dtype=torch.int32),
        }
        inputs = {name: numpy.ascontiguousarray(value) for name, value in passed.items()}
        found.append(torch.tensor(request.infer(inputs)["logits"]))
    return torch.cat(found, dim=1)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_graphs_give_the_models_logits(
    kind: str, made: Callable[..., Path], tiny_target: Callable[..., str]
) -> None:
    """In one pass and in several, in a batch and behind padding."""
    draft = made(kind)
    out = export(draft, with_target=True)
    ids = torch.randint(3, 288, (2, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    for folder, graph in ((Path(tiny_target(kind)), out / TARGET), (draft, out)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            expected = model(
                ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
            ).logits
        for cuts in ([30], [12, 13, 30]):
            found = computed(graph, ids, mask, cuts)
            assert torch.allclose(found[mask == 1], expected[mask == 1], atol=1e-4)


@pytest.mark.long
def test_texts_become_the_targets_tokens(
    made: Callable[..., Path], tiny_target: Callable[..., str]
) -> None:
    import openvino_genai

    read = openvino_genai.Tokenizer(export(made(num_layers=1)))
    own = AutoTokenizer.from_pretrained(tiny_target("llama"))
    for text in ("def main(): return 12345", "It's 3.5 times; don't!\n\n  ok", "naïve Äö"):
        ids = own.encode(text)
        assert read.encode(text).input_ids.data.tolist() == [ids]
        assert read.decode(ids) == own.decode(ids)


def test_a_second_layer_is_refused(made: Callable[..., Path]) -> None:
    config = read_json(made(family="eagle3", **EAGLE3) / "config.json")
    check_represented(config, READER)
    with pytest.raises(UserError, match="feeds back the state of the first"):
        check_represented({**config, "num_hidden_layers": 2}, READER)


@pytest.mark.long
def test_embeddings_of_its_own_are_refused(
    made: Callable[..., Path], tiny_target: Callable[..., str]
) -> None:
    draft = made(family="eagle3", **EAGLE3)
    tensors, table = read_weights(draft), read_weights(Path(tiny_target("llama")))
    own = table["model.embed_tokens.weight"].float()
    config = read_json(draft / "config.json")
    write_weights(draft, config, {**tensors, "embed_tokens.weight": own})
    assert (export(draft) / MODEL).is_file()  # a copy of the target's
    write_weights(draft, config, {**tensors, "embed_tokens.weight": own.flip(0)})
    with pytest.raises(UserError, match="gives it the target's"):
        export(draft)


@pytest.mark.long
def test_sixteen_bit_checkpoints_stay_so(
    made: Callable[..., Path], tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    whole = export(made(), with_target=True)
    sizes = [(folder / BIN).stat().st_size for folder in (whole, whole / TARGET)]
    model = AutoModelForCausalLM.from_pretrained(tiny_target("llama"), dtype=torch.float16)
    model.save_pretrained(tmp_path / "half")
    tokenizer = Path(tiny_target("llama"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "half" / name).write_bytes((tokenizer / name).read_bytes())
    half = export(tmp_path / "draft", with_target=True, target=str(tmp_path / "half"))
    assert (half / BIN).stat().st_size == pytest.approx(sizes[0], rel=0.01)
    assert (half / TARGET / BIN).stat().st_size < 0.6 * sizes[1]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("gpt2", "of kind 'gpt2', and draftsmith writes llama, mistral"), ("mistral", "a window")],
)
def test_models_that_are_not_written_are_refused(
    kind: str, reason: str, made: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=reason):
        export(made(kind))


def test_factors_that_depend_on_the_length_are_refused(made: Callable[..., Path]) -> None:
    draft = made()
    config = read_json(draft / "config.json")
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    write_json(draft / "config.json", {**config, "rope_parameters": scaled})
    with pytest.raises(UserError, match="depend on the length of a text"):
        export(draft)


def test_a_missing_package_is_named(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = made()
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(UserError, match=r"needs openvino, .* pip install 'draftsmith\[openvino\]'"):
        export(draft)
