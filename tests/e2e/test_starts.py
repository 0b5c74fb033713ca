"""Every option of every command is started once with another value than its default: no traceback,
and a sentence where this machine cannot give what is asked for."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from draftsmith import config as configuration
from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.commands.table import COMMANDS, load
from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.registry import FAMILIES
from tests.foreign_lm import write_foreign
from tests.forked import Forked, cli, free_port
from tests.integration.conftest import Loop
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
STARTS = Path(__file__).with_name("starts.txt")
START_S = 120
PIPELINE = """
settings: {target: target, text: null}
stages:
  - {name: data, command: generate, options: {target: "${target}", prompts: "${text}"}}
"""
DATA = (
    "generate --target target --prompts stdlib:code --count 24 --prompt-tokens 8 --max-tokens 12 "
    "--top-logprobs 8 --store-taps bf16 --out data"
)
STORE = "fleet publish --versions versions --to store --once"
SERVER = (
    "serve --target target --draft draft --k 2 --name tiny --api-key key --threads 1 --port {port}"
)


def spans(text: str) -> list[tuple[int, int]]:
    """What `--redact` names."""
    return []


class Start(NamedTuple):
    words: list[str]
    kind: str  # "status", "until" or "refused"
    what: str  # the statuses, what it prints, or a part of the sentence


def starts() -> list[Start]:
    lines = [line for line in STARTS.read_text().splitlines() if line and line[0] != "#"]
    found = []
    for line in re.sub(r"\n +", " ", "\n".join(lines)).splitlines():
        command, _, ending = line.partition(" -> ")
        kind, _, what = (ending or "status 0").partition(" ")
        words = shlex.split(command)
        found.append(Start(words, kind, what))
    return found


def filled(words: list[str], server: str, port: int) -> list[str]:
    values = {"{server}": server, "{port}": str(port), "{root}": str(ROOT)}
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    return words


def changed(cls: type, built: Any, prefix: str = "") -> set[str]:
    """Options that have another value than their default, or none."""
    found = set()
    types = configuration.field_types(cls)
    for field in dataclasses.fields(cls):
        inner, value = configuration.plain(types[field.name]), getattr(built, field.name)
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        if not dataclasses.is_dataclass(inner):
            found |= {prefix + field.name} if value != default else set()
        elif value is not None:
            found |= changed(inner, value, f"{prefix}{field.name}.")
    return found


def given(words: list[str]) -> set[str]:
    """Options, as `command a.b`, that this start gives another value than their default."""
    name, *argv = words
    cls = load(COMMANDS[name].config)
    built = configuration.build(cls, collect(cls, parse(parser_for(name, cls), argv)))
    return {f"{name} {key}" for key in changed(cls, built)}


@pytest.fixture(scope="module")
def room(tiny_target: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what the starts name."""
    root = tmp_path_factory.mktemp("room")
    (root / "target").symlink_to(tiny_target("llama"))
    loop = Loop(root, str(root / "target"), "eagle3")
    options = DraftLmOptions(num_layers=1, hidden_size=32)
    lm = FAMILIES["draft-lm"].create(options, loop.target, seed=0)
    checkpoint.save(lm, root / "lm-draft", loop.target)
    loop.serve(24, record_taps=64)
    for parent in (None, 1):
        loop.publish(checkpoint.load(root / "draft", loop.target), parent=parent)
    write_foreign(root / "foreign", loop.target.tokenizer())
    model = AutoModelForCausalLM.from_pretrained(root / "target")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(root / "adapter")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats = datasets.Dataset.from_list([{"messages": said}] * 4)
    datasets.DatasetDict(train=chats, other=chats).save_to_disk(root / "prompt-sets")
    (root / "prompts.jsonl").write_text("".join(f'{{"prompt": "text {n}"}}\n' for n in range(4)))
    (root / "recipe.yaml").write_text("held_out: 0.3\n")
    (root / "pipeline.yaml").write_text(PIPELINE)
    for made in (DATA, STORE):
        with process(root, made.split()) as (running, _):
            assert running.wait(START_S) == 0, running.stdout.read()
    return root


@pytest.fixture(scope="module")
def server(room: Path) -> Iterator[str]:
    """Address of a server with all that the starts ask of one."""
    port = free_port()
    with process(room, filled(SERVER.split(), "", port)) as (_, wait):
        wait("serving 'tiny' on")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def process(room: Path, words: list[str]) -> Iterator[tuple[Forked, Callable[[str], None]]]:
    """The command, and a function that waits until it has printed a text."""
    variables = {"DRAFTSMITH_API_KEY": "key"}
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    running = Forked(cli(*words), cwd=room, env=os.environ | variables, **streams)

    def wait(text: str) -> None:
        said = running.stdout.read
        wait_until(lambda: text in said(), START_S, process=running, said=said)

    try:
        yield running, wait
    finally:
        running.terminate()
        running.wait(START_S)


def test_every_option_has_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new option needs a line in `starts.txt`."""
    monkeypatch.chdir(tmp_path)
    every = {
        f"{name} {key}"
        for name, command in COMMANDS.items()
        for key in configuration.dotted_names(load(command.config))
    }
    started = set().union(*(given(filled(one.words, "http://x", 1)) for one in starts()))
    assert sorted(every - started) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "start", [pytest.param(one, id=" ".join(one.words)[:60]) for one in starts()]
)
def test_it_starts(start: Start, room: Path, server: str) -> None:
    with process(room, filled(start.words, server, free_port())) as (running, wait):
        if start.kind == "until":
            wait(start.what)
            running.send_signal(signal.SIGTERM)
        status = running.wait(START_S)
        shown = running.stdout.read()
    assert "Traceback" not in shown, shown
    if start.kind == "refused":
        last = shown.splitlines()[-1]
        assert status == 2 and last.startswith("draftsmith: error: ") and start.what in last, shown
    else:
        # What only shows something ends by the signal itself.
        allowed = start.what.split() if start.kind == "status" else ["0", str(-signal.SIGTERM)]
        assert str(status) in allowed, shown
