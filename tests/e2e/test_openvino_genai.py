"""Drafts trained and exported here, run by OpenVINO GenAI on the CPU: same greedy output, as many
tokens accepted as predicted offline and as served by our own engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.e2e.workshop import (
    MAX_TOKENS,
    K,
    check_accepted,
    check_plain,
    check_shifted,
    exported,
    llama_workshop,
    texts,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

openvino_genai = pytest.importorskip(
    "openvino_genai", reason="the extra [openvino] is not installed"
)

FAMILIES = ("draft-lm", "eagle3")
# Numbers as exact as the weights; threads of its own would wait for the cores of other tests.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, tiny_target: Callable[..., str]) -> Path:
    folder = llama_workshop(tmp_path_factory, tiny_target)
    pair = folder / exported(folder, "eagle3", "openvino", "--with-target")
    # Another export of the draft replaces its folder.
    shutil.copytree(pair / "target", folder / "graphs", dirs_exist_ok=True)
    return folder


def answers(folder: Path, draft: Path | None) -> dict[str, Any]:
    """Greedy answers to all prompts; with a draft, rounds and accepted tokens too."""
    from openvino import Tensor

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = 256
    scheduler.enable_prefix_caching = False
    more: dict[str, Any] = {}
    if draft is not None:
        more["draft_model"] = openvino_genai.draft_model(draft, "CPU", **EXACT)
    pipeline = openvino_genai.LLMPipeline(
        folder / "graphs", "CPU", scheduler_config=scheduler, **more, **EXACT
    )
    options = {} if draft is None else {"num_assistant_tokens": K}
    found: dict[str, Any] = {"tokens": [], "rounds": 0, "accepted": 0}
    for prompt, _ in texts(folder):
        answer = pipeline.generate(
            Tensor(numpy.array([prompt])), max_new_tokens=MAX_TOKENS, do_sample=False, **options
        )
        tokens = answer.tokens[0]
        found["tokens"].append(tokens)
        if draft is not None:
            passes = len(answer.extended_perf_metrics.main_model_metrics.raw_metrics.m_durations)
            # The first pass reads the prompt and gives one token.
            found["rounds"] += passes - 1
            found["accepted"] += len(tokens) - passes
    return found


@pytest.fixture(scope="module")
def plain(workshop: Path) -> dict[str, Any]:
    return check_plain(workshop, answers(workshop, None), earlier=1, later=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_accepts_what_was_predicted(
    family: str, workshop: Path, plain: dict[str, Any]
) -> None:
    found = answers(workshop, workshop / exported(workshop, family, "openvino"))
    assert found["tokens"] == plain["tokens"], "speculation changed GenAI's own greedy output"
    check_accepted("OpenVINO GenAI", workshop, family, found)


def test_a_tap_off_by_one_would_be_noticed(workshop: Path, plain: dict[str, Any]) -> None:
    from openvino import Core

    from draftsmith.train.export.openvino import MODEL, write_graph

    shifted = workshop / "shifted"
    shutil.copytree(workshop / exported(workshop, "eagle3", "openvino"), shifted)
    graph = Core().read_model(shifted / MODEL)
    graph.set_rt_info("1 2 3", ["hidden_layers_list"])
    (shifted / "written").mkdir()
    write_graph(graph, shifted / "written", half=False)
    for file in (shifted / "written").iterdir():
        file.replace(shifted / file.name)
    check_shifted(workshop, answers(workshop, shifted), plain)
