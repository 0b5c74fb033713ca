"""The command table and the frozen list of flags."""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith import config as configuration
from draftsmith.cli import main, overview
from draftsmith.commands.arguments import parser_for
from draftsmith.commands.table import COMMANDS, load
from draftsmith.version import __version__

FLAGS = Path(__file__).with_name("flags.txt")


def flag_list() -> str:
    """One line a flag or positional, with nested recipe keys as `command a.b`."""
    lines = []
    for name, command in COMMANDS.items():
        cls = load(command.config)
        parser = parser_for(name, cls)
        for action in parser._actions:
            lines += [
                f"{name} {option}"
                for option in action.option_strings or [action.dest]
                if option not in ("-h", "--help") and action.help != argparse.SUPPRESS
            ]
        lines += [f"{name} {key}" for key in configuration.dotted_names(cls) if "." in key]
    return "\n".join(lines) + "\n"


def test_the_flag_list_is_frozen() -> None:
    """A new or renamed flag is a decision. If it is meant: `python tests/unit/cli/test_cli.py`
    rewrites the list."""
    known, now = FLAGS.read_text().splitlines(), flag_list().splitlines()
    assert (sorted(set(now) - set(known)), sorted(set(known) - set(now))) == ([], []), (
        "new flags, and flags that are gone"
    )
    assert now == known


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_explains_itself(name: str) -> None:
    for field, _ in configuration.flag_options(load(COMMANDS[name].config)):
        assert field.metadata.get("help"), f"{name} {field.name} has no help text"


def test_a_command_of_one_process_is_refused_under_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["run", "x"]) == 2
    assert "WORLD_SIZE is 4, but run is one process" in capsys.readouterr().err


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.strip() == overview()
    assert all(f"\n  {name}" in shown for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"draftsmith {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["exprt"], "unknown command 'exprt'; did you mean 'export'?"),
        (["export", "d", "--uot", "x"], "unknown option '--uot'; did you mean '--out'?"),
        (["serve", "--kv-cache-dtype"], "'--kv-cache-dtype'; draftsmith serve --help lists all"),
        (
            ["export", "d", "--to", "tensorrt", "--out", "x"],
            "it must be one of vllm, sglang, speculators, hf",
        ),
        (["doctor"], "option 'target' is required; give --target"),
        (["train", "optim.lr=1", "a.yaml", "eagle", "T"], "recipe 'a.yaml' does not exist"),
        (["train", "optim.lr=1", "eagle", "T", "data=d", "out=o"], "option 'family' is 'eagle';"),
    ],
)
def test_bad_usage_is_one_sentence_and_status_2(
    argv: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("draftsmith: error: ") and shown.err.count("\n") == 1
    assert wanted in shown.err


@pytest.mark.parametrize(
    ("name", "reason"), [("file/buffer", "Not a directory"), ("x" * 300, "File name too long")]
)
@pytest.mark.parametrize("command", [["observe", "http://127.0.0.1:9"], ["forget", "--request=c"]])
def test_a_path_that_cannot_be_used_is_a_sentence(
    command: list[str], name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    buffer = tmp_path / name
    assert main([*command, "--buffer", str(buffer)]) == 2
    told = f"draftsmith: error: path '{buffer}' cannot be used ({reason}); give another\n"
    assert capsys.readouterr().err == told


def test_help_puts_options_under_the_heading_of_the_class_that_declares_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(
        "usage: draftsmith serve [TARGET] [options] [recipe.yaml | key=value ...]\n"
    )
    headings = {
        "target and draft:\n": "--target",
        "drafting and verification:\n": "--tree",
        "the server that clients meet:\n": "--port",
    }
    for heading, flag in headings.items():
        part = shown.partition(f"\n{heading}")[2].partition("\n\n")[0]
        assert f"  {flag} " in part, heading


def test_what_deepspeed_finds_at_its_import_is_not_told(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "chat"]) == 0
    logging.getLogger("DeepSpeed").warning("Setting accelerator to CPU")
    assert not caplog.records


@pytest.mark.parametrize(("name", "is_resumed"), [("train", True), ("plan", False)])
def test_an_interrupt_promises_to_go_on_only_where_the_command_does(
    name: str, is_resumed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        COMMANDS, name, COMMANDS[name]._replace(run="tests.unit.cli.test_cli:interrupt")
    )
    words = ["eagle3", "--data", "d", "--out", "o"] if name == "train" else []
    assert main([name, *words, "--target", "."]) == 130
    assert ("run the same command to go on" in capsys.readouterr().err) == is_resumed


def interrupt(config: object) -> int:
    raise KeyboardInterrupt


def test_a_log_of_json_is_so_from_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "draftsmith.json").write_text('{"target": {"name": "org/model"}}')
    words = ["--draft", str(tmp_path), "--num-speculative-tokens", "5", "log_format=json"]
    command = [sys.executable, "-m", "draftsmith.cli", "serve", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        said = [json.loads(process.stderr.readline())["message"] for _ in range(3)]
        process.kill()
    assert said[0] == "--num-speculative-tokens is --k here"
    assert said[1].startswith("the target is 'org/model', as ") and "asking" in said[2]


def test_a_command_that_waits_for_torch_says_so_before_it() -> None:
    code = """
import draftsmith, os
from draftsmith import cli
os.environ.pop("OMP_NUM_THREADS", None)
os.getloadavg = lambda: (os.cpu_count() + 1.0, 0.0, 0.0)
observed = ["--url", "http://h", "--buffer", "b"]
commands = {"bench": ["."], "observe": observed, "plan": ["."], "chat": []}
for name, words in {**commands, "generate": [".", "prompts=p", "out=o"]}.items():
    cli.COMMANDS[name] = cli.COMMANDS[name]._replace(run="builtins:print")
    cli.main([name, *words])
    draftsmith.progress.say_once.cache_clear()
draftsmith._HOMES["Engine"] = "types"
getattr(draftsmith, "Engine", None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = ["loading", *["other work has the cores", "loading"] * 2, "loading"]
    found = done.stderr.splitlines()
    assert len(found) == 6 and all(f"draftsmith: {a}" in b for a, b in zip(said, found))
    assert done.stdout.count("Config(") == 5


def test_a_server_that_is_loading_says_that_it_stops() -> None:
    code = """
import os, signal, sys, threading, time, types
from draftsmith import cli
loading = types.SimpleNamespace(run=lambda *_: time.sleep(60))
sys.modules["draftsmith.serve.command"] = loading
threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
cli.main(["serve", ".", "--drain-s", "2"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 0 and "stopping: requests that run get 2 s to finish" in last


@pytest.mark.parametrize(("beside", "of_session"), [("0", "10"), ("60", "0")])
def test_a_learner_gives_way_to_servers_on_its_cores(beside: str, of_session: str) -> None:
    """Its session too, where Linux shares the cores out by it and nothing else is there."""
    code = """
import os, subprocess, sys
from draftsmith import cli
cat, (_, seconds) = ["cat", "/proc/self/autogroup"], sys.argv
os.nice, cli._dispatch = print, lambda words: subprocess.run(cat).returncode
other = subprocess.Popen(["sleep", seconds])
seconds == "0" and other.wait()
for sys.argv in [["draftsmith", name] for name in ("distill", "serve")]:
    cli.main()
    cli.main(sys.argv[1:])  # in a process of somebody else
other.kill()
"""
    command = [sys.executable, "-u", "-c", code, beside]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    given, *groups = [line.split()[-1] for line in done.stdout.splitlines()]
    assert given == "10" and groups == [of_session, "0", "0", "0"][: len(groups)]


def test_wrong_options_are_refused_before_torch_is_loaded() -> None:
    code = """
import sys
from draftsmith import cli
cli.main(["eval", "t", "--draft", "d"])
cli.main(["train", "eagle3", "t", "--data", "no/such", "--out", "o"])
for words in (
    *("serve ./no", "bench ./no", "plan no.gguf", "eval . draft=./no suite=spec-bench"),
    *("serve . --lora sql=./no", "bench . --suffix --suffix-answers ./no", "doctor ./no"),
    "generate ./no url=http://127.0.0.1:9 prompts=stdlib:code out=o",
    *("distill . draft=./no buffer=b versions=v", "export ./no to=hf out=o"),
    *("audit", "audit url=http://127.0.0.1:9", "doctor url=http://127.0.0.1:9"),
    *("bench url=http://127.0.0.1:9", "serve . k=99", "generate . prompts=./no out=o"),
    *("generate . prompts=p count=0 out=o", "export . to=hf out=o push=a/b/c"),
    "distill . draft=. buffer=b versions=v learn.teacher=recorded learn.positions=[bonus]",
):
    cli.main(words.split())
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    refused = [line for line in done.stderr.splitlines() if "draftsmith: error: " in line]
    told = ["'data' is not given", "'no/such' is not a folder", *["check the path"] * 9]
    told += ["nothing to", "the URL", "the URL", "'k' is 99", "'./no' do not exist", "'count' is 0"]
    told += ["is not a Hub repository", "is 'bonus' alone"]
    assert len(refused) == len(told) and all(a in b for a, b in zip(told, refused)), refused
    assert "check the path" in done.stdout and done.returncode == 0


if __name__ == "__main__":
    FLAGS.write_text(flag_list())
