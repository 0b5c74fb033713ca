"""Runs of tests in forked copies of one process that has imported the heavy libraries, each in a
copy of the tree.

A fork costs a few milliseconds where an import of torch costs seconds. The parent starts no thread
and imports nothing of the project, which the child takes from its own tree.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PRELOADED = (
    "torch", "transformers", "transformers.models.llama.modeling_llama", "safetensors.torch",
    "tokenizers", "triton",
    "scipy.stats", "hypothesis", "yaml", "httpx",
)  # fmt: skip
# What a copy leaves out: other environments, caches, git's own files.
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
# The folders of a tree that hold what mutants are made of. A test has noticed nothing where these
# raise.
CODE_FOLDERS = ("kernels", "drafters", "train", "serve", "distill", "fleet", "src")
TAIL_CHARS = 1500


@dataclass
class Job:
    """Tests to run in a tree, after `edit`, for at most `limit_s` seconds."""

    name: str
    tests: list[str]
    limit_s: float
    file: str = ""  # the file of the tree that `text` replaces meanwhile
    text: str = ""
    first_failure_ends: bool = True


@dataclass
class Outcome:
    """Outcome of a job's tests."""

    seconds: float
    # pytest's exit status; None when the process was ended, by a signal or after its time
    status: int | None
    timed_out: bool = False
    # Node id, phase, outcome, name of the exception, whether it is the test's own (`noticed`),
    # seconds.
    reports: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""  # the end of what pytest wrote

    def called(self, outcome: str) -> list[dict[str, Any]]:
        return [
            report
            for report in self.reports
            if report["phase"] == "call" and report["outcome"] == outcome
        ]


def preload(names: tuple[str, ...] = PRELOADED) -> None:
    """Imports what every test would; a library that is not installed is left to the tests that need
    it."""
    # Triton reads it when it is imported; a mutant is judged on the CPU wherever it runs.
    os.environ.update(
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
    )
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def copy_tree(root: Path, destination: Path) -> Path:
    """A checkout's files, links as links: src/draftsmith/kernels and the others lead to the copy's
    own folders."""
    return Path(shutil.copytree(root, destination, symlinks=True, ignore=LEFT_OUT))


def twin(tree: Path, destination: Path) -> Path:
    """A copy of a copy, compiled files included."""
    return Path(shutil.copytree(tree, destination, symlinks=True))


def run_all(jobs: list[Job], trees: list[Path], done: Callable[[Job, Outcome], None]) -> None:
    """Runs the jobs, one at a time in each tree; `done` gets each outcome as it comes."""
    waiting, free = list(jobs), list(trees)
    running: list[_Child] = []
    try:
        while waiting or running:
            while waiting and free:
                running.append(_Child(waiting.pop(0), free.pop()))
            for child in [child for child in running if child.ended()]:
                running.remove(child)
                free.append(child.tree)
                done(child.job, child.outcome())
            time.sleep(0.02)
    finally:
        for child in running:
            child.stop()


class _Child:
    """A forked process that runs one job in one tree."""

    def __init__(self, job: Job, tree: Path):
        self.job, self.tree, self.timed_out = job, tree, False
        self.log, self.result = tree.with_suffix(".log"), tree.with_suffix(".json")
        self.result.unlink(missing_ok=True)
        self.original = (tree / job.file).read_bytes() if job.file else b""
        if job.file:
            (tree / job.file).write_text(job.text, encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        self.begun_s = time.monotonic()
        self.process = os.fork()
        if self.process == 0:
            _run_child(job, tree, self.log, self.result)

    def ended(self) -> bool:
        if time.monotonic() - self.begun_s > self.job.limit_s:
            self.timed_out = True
            return True
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def outcome(self) -> Outcome:
        seconds = time.monotonic() - self.begun_s
        self.stop()
        output = self.log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:]
        if self.timed_out or not self.result.exists():
            return Outcome(seconds, None, self.timed_out, output=output)
        answer = json.loads(self.result.read_text(encoding="utf-8"))
        return Outcome(seconds, answer["status"], reports=answer["reports"], output=output)

    def stop(self) -> None:
        # Before the process is reaped, so that its number is still its own: servers that a test
        # left behind are in its group.
        self._kill()
        os.waitpid(self.process, 0)
        if self.job.file:
            (self.tree / self.job.file).write_bytes(self.original)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process, signal.SIGKILL)


def noticed(error: BaseException, tree: Path) -> bool:
    """True where a test failed by its assertions: one that does not hold, of its own or of a
    testing library, or an exception expected in vain. What the code itself raises is no such thing,
    its own assertions included."""
    if members := getattr(error, "exceptions", ()):
        # A group: several examples of one property.
        return any(noticed(one, tree) for one in members)
    if not isinstance(error, (AssertionError, pytest.fail.Exception)):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = None if trace is None else Path(trace.tb_frame.f_code.co_filename).resolve()
    return raised_in is None or not any(
        raised_in.is_relative_to(tree / folder) for folder in CODE_FOLDERS
    )


class _Reports:
    """A pytest plugin that keeps the outcome of every phase of every test, and ends the run once a
    test has noticed something where `first_failure_ends`."""

    def __init__(self, tree: Path, first_failure_ends: bool) -> None:
        self.tree, self.first_failure_ends = tree.resolve(), first_failure_ends
        self.reports: list[dict[str, Any]] = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, None]:
        result = yield
        report = result.get_result()
        raised = "" if call.excinfo is None else call.excinfo.type.__name__
        own = report.failed and call.excinfo is not None and noticed(call.excinfo.value, self.tree)
        if own and report.when == "call" and self.first_failure_ends:
            item.session.shouldfail = "noticed"
        self.reports.append(
            {
                "test": report.nodeid,
                "phase": report.when,
                "outcome": report.outcome,
                "raised": raised,
                "noticed": own,
                "seconds": report.duration,
            }
        )


def _run_child(job: Job, tree: Path, log: Path, result: Path) -> None:
    """Never returns: the tests run, their outcome is written, the process ends."""
    status = 3
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree / "src")
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(tree / "src"))
        status = _run_tests(job, tree, result)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # No clean-up of what the parent had open.
        os._exit(status)


def _run_tests(job: Job, tree: Path, result: Path) -> int:
    reports = _Reports(tree, job.first_failure_ends)
    options = ["-q", "-p", "no:cacheprovider", "-o", "timeout=0", "--tb=short"]
    status = int(pytest.main([*options, *job.tests], plugins=[reports]))
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps({"status": status, "reports": reports.reports}), encoding="utf-8")
    partial.replace(result)
    return status
