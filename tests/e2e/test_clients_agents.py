"""Tool loops of openai's client and of the OpenAI Agents SDK, in an environment of their own."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def chat_folder(
    tiny_target: Callable[..., str], tool_template: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny target with tools in its template and room for long answers: it ends one seldom."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(tiny_target("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    (folder / "chat_template.jinja").write_text(tool_template)
    return folder


def test_agents_call_tools_and_answer(
    chat_folder: Path, launch: Callable, run_client: Callable[..., str], tmp_path: Path
) -> None:
    script = str(Path(sys.executable).with_name("draftsmith"))
    command = [script, "serve", "--target", str(chat_folder), "--name", "tiny"]
    server = launch([*command, "--suffix", "--k", "3", "--seed", "0"])
    probe = str(Path(__file__).with_name("agents_probe.py"))
    told = json.loads(
        run_client("agents", "bin/python", probe, server.url, cwd=tmp_path).splitlines()[-1]
    )
    assert told["loop"][0] == "tool_calls" and told["loop"][1] in ("stop", "length")
    items = ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    for kind in ("OpenAIResponsesModel", "OpenAIChatCompletionsModel"):
        assert told["agents"][kind]["items"] == told["agents"][kind]["streamed"] == items
        assert told["agents"][kind]["outputs"][0] in ("21 C", "21 F")
        assert told["agents"][kind]["raw_events"] > 10
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
