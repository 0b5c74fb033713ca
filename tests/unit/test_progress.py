"""The progress of long work, on a terminal and in a log, and logs in one format."""

from __future__ import annotations

import fcntl
import gc
import io
import itertools
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftsmith.cli import main
from draftsmith.commands.table import COMMANDS, Command, start
from draftsmith.progress import Lines, Progress, factor, say

LOGS = """
import logging, sys, warnings
library = logging.getLogger("library")
library.addHandler(logging.StreamHandler())  # as transformers and huggingface_hub have
library.propagate = False
from draftsmith.progress import Progress, say, set_up_logging
set_up_logging({form!r})
library.warning("one\\ntwo")
for chatty in ("httpx", "fsspec", "botocore.credentials", "aiobotocore.credentials"):
    logging.getLogger(chatty).info("too much")
say("loading")
Progress("work", 3, unit="parts").close()
warnings.warn("old")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("draftsmith.x").exception("broken %d", 3)
import subprocess
child = "import logging; from draftsmith.progress import *; set_up_logging(); logging.info('child')"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def advance() -> None:
    progress = Progress("generate", 200, unit="answers", start=100)
    time.sleep(0.3)
    progress.update(150, "812 tok/s")
    progress.close("all of it")


def test_a_log_has_a_line_at_the_start_and_one_at_the_end(capsys: pytest.CaptureFixture) -> None:
    advance()
    Progress("nothing", 0, unit="texts").close()
    Progress("of another process", 9, unit="texts", shows=False).close("done")
    Progress("a longer run", 6, unit="steps", start=12).close()
    first, last, longer, _ = capsys.readouterr().err.splitlines()
    assert longer == "a longer run: 12/12 steps [00:00<?]"
    assert first == "generate: 100/200 answers [00:00<?]"
    as_shown = r"generate: 150/200 answers \[(\d\d:\d\d)<(\d\d:\d\d), all of it\]"
    done, left = re.fullmatch(as_shown, last).groups()
    assert done == left  # as fast as the half that was done here


def test_a_step_that_takes_long_is_seen_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("draftsmith.progress.SILENT_S", 0.2)
    around, work = Progress("around", 2, unit="works"), Progress("work", 3, unit="parts")
    time.sleep(1.5)  # the thread that shows it may be in a wait of a second
    del around, work  # as an error leaves them
    shown = capsys.readouterr().err
    assert shown.count("work: ") > 3 and shown.count("around: ") == 2
    time.sleep(0.5)
    assert capsys.readouterr().err == ""


def test_imports_that_take_long_are_seen_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("draftsmith.progress.SILENT_S", 0.2)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_command.py").write_text("import time; time.sleep(1.5); run = len")
    monkeypatch.setitem(COMMANDS, "slow", Command("", "slow_command:run", "", loads=True))
    lines: list[tuple[float, str]] = []
    monkeypatch.setattr(Lines, "write", lambda _, line: lines.append((time.monotonic(), line)))
    Progress("before", 1, unit="steps", delay=9).close()  # whose watch goes on for a while
    assert start("slow", "abc") == 3
    assert capsys.readouterr().err == "draftsmith: loading torch and transformers\n"
    shown = [at for at, line in lines if "loading torch and transformers: 0/1 steps" in line]
    assert len(shown) > 1 and all(later - at > 0.15 for at, later in itertools.pairwise(shown))


def test_work_within_work_has_lines_of_its_own_in_a_log(capsys: pytest.CaptureFixture) -> None:
    outer = Progress("train", 2, unit="steps")
    advance()
    outer.update(2)
    outer.close()
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert [line.split(" [")[0] for line in told.splitlines()] == [
        "train: 0/2 steps", "generate: 100/200 answers", "generate: 150/200 answers",
        "train: 2/2 steps",
    ]  # fmt: skip


def test_an_error_is_the_last_line_of_work_that_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n')
    arguments = ["--prompts", str(prompts), "--num-prompts", "1", "--model", "m"]
    assert main(["bench", "--url", "http://127.0.0.1:9", *arguments]) == 2
    gc.collect()
    *_, bar, last = capsys.readouterr().err.splitlines()
    assert bar.startswith("bench: 0/") and last.startswith("draftsmith: error: ")


def on_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], None] = advance
) -> str:
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    shown = b""
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        work()
        stream.flush()
        while b"all of it" not in shown or not shown.endswith(b"\n"):
            shown += os.read(controller, 65536)
    return shown.decode().replace("\r\n", "\n")


def test_a_terminal_has_one_bar_that_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_terminal(100, monkeypatch)
    first, middle, last = shown.strip().split("\r")
    assert "| 100/200 answers [" in first and "812 tok/s" in middle and "all of it" in last
    assert shown.count("\n") == 1
    assert on_terminal(0, monkeypatch).startswith("generate: 100/200 answers [00:00<?]\n")


def test_a_line_beside_a_bar_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        progress = Progress("work", 2, unit="parts")
        say("resting")
        progress.close("all of it")

    assert "\rdraftsmith: resting\n" in on_terminal(100, monkeypatch, work)


def test_a_stream_that_only_says_it_is_a_terminal_has_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Wrapper(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Wrapper())
    advance()
    assert sys.stderr.getvalue().startswith("generate: 100/200 answers [00:00<?]\n")


def written(form: str) -> Iterator[str]:
    code = LOGS.format(form=form)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return iter(done.stderr.removesuffix("\n").split("\n"))


def test_json_lines_hold_all_that_is_logged() -> None:
    entries = [json.loads(line) for line in written("json")]
    assert [f"{one['level']} {one['logger']}" for one in entries] == [
        "WARNING library", *["INFO draftsmith"] * 3, "WARNING py.warnings", "ERROR draftsmith.x",
        "INFO root",
    ]  # fmt: skip
    assert [one["message"] for one in entries[:3]] == [
        "one\ntwo", "loading", "work: 0/3 parts [00:00<?]",
    ]  # fmt: skip
    assert entries[5]["message"] == "broken 3" and "ZeroDivision" in entries[5]["exception"]
    assert all(one["time"][10] == "T" for one in entries)


def test_text_lines_have_time_and_level() -> None:
    lines = list(written("text"))
    assert lines[0].endswith(" WARNING library: one") and lines[0].startswith("20")
    assert lines[1] == "two" and lines[2].endswith(" INFO draftsmith: loading")
    assert lines[-1].endswith(" INFO root: child")


def test_a_power_of_ten_is_a_number() -> None:
    assert [factor(value) for value in (-0.4, 0.0, 31.2, 400)] == ["0.4", "1", "1.6e+31", "1e+400"]
