"""Commands of this project in processes forked from one that has already imported torch,
transformers and the project: as `subprocess` runs them, without seconds of imports each.

Processes forked in one session share the seed of `hash`, unlike those that are started; a test for
which that matters starts one of them by `subprocess`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "draftsmith.cli",
        "draftsmith.distill.command",
        "draftsmith.serve.command",
        "draftsmith.train.command",
        "draftsmith.train.evaluate.command",
        "peft",
        "torch._dynamo",  # what an optimizer's first step imports
        "torch.distributed.elastic.multiprocessing.errors",
        "transformers.models.llama.modeling_llama",
    ]
)


class Forked:
    """What the tests need of `subprocess.Popen`, for `[sys.executable, "-m", module, ...]` and
    `[sys.executable, "-c", code, ...]`.

    `PIPE` is a file here, which need not be read for the process to go on.
    """

    def __init__(
        self,
        command: Sequence[Any],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = True,
    ):
        self.args = [str(word) for word in command]
        assert self.args[0] == sys.executable and self.args[1] in ("-m", "-c") and text, self.args
        self.stdout, out = opened(stdout, 1)
        self.stderr, err = (self.stdout, out) if stderr == subprocess.STDOUT else opened(stderr, 2)
        # A daemon, which does not outlive the session.
        self._process = CONTEXT.Process(
            target=become,
            daemon=True,
            args=(
                self.args[1:],
                dict(os.environ if env is None else env),
                str(cwd or os.getcwd()),
                # A connection is what can be handed to the process by its descriptor.
                Connection(os.dup(out), readable=False),
                Connection(os.dup(err), readable=False),
            ),
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        self.wait(timeout)
        separate = self.stderr is not self.stdout
        return read(self.stdout), read(self.stderr) if separate else None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


def cli(*words: Any) -> list[str]:
    """A command of this project, as `Forked` and `subprocess` take it."""
    return [sys.executable, "-m", "draftsmith.cli", *map(str, words)]


def torchrun(count: int, *words: Any) -> list[str]:
    """A command or script in `count` processes that torchrun starts."""
    launcher = [f"--nproc_per_node={count}", f"--master_port={free_port()}"]
    return [sys.executable, "-m", "torch.distributed.run", *launcher, *map(str, words)]


def one_thread(**more: str) -> dict[str, str]:
    """This environment for a process that shares two cores with others, without a GPU."""
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """A command in `count` processes of one group, as torchrun starts them."""

    def __init__(self, command: Sequence[Any], count: int, **env: str):
        place = one_thread(**env) | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
        }
        self.processes = [
            Forked(
                command,
                env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank in range(count)
        ]

    @property
    def returncode(self) -> int | None:
        """The first failure's, else the last one's."""
        codes = [process.returncode for process in self.processes]
        return next((code for code in codes if code), codes[-1])

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        return "\n".join(process.communicate(timeout)[0] or "" for process in self.processes), None


def finish(process: Any) -> str:
    """What the command says until it ends, as it should."""
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


class Output:
    """What a process has written so far."""

    def __init__(self) -> None:
        # Appended to, so that reading does not move where the process writes.
        self.file = tempfile.TemporaryFile("a+", encoding="utf-8", errors="replace")  # noqa: SIM115

    def fileno(self) -> int:
        return self.file.fileno()

    def read(self) -> str:
        self.file.seek(0)
        return self.file.read()


def opened(stream: Any, inherited: int) -> tuple[Output | None, int]:
    """What is read from, and the descriptor that the process writes to."""
    if stream == subprocess.PIPE:
        output = Output()
        return output, output.fileno()
    return None, inherited if stream is None else stream.fileno()


def read(output: Output | None) -> str | None:
    return None if output is None else output.read()


def run(
    command: Sequence[Any],
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = Forked(command, **options)
    try:
        out, err = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def become(
    arguments: list[str], environment: dict[str, str], cwd: str, out: Connection, err: Connection
) -> None:
    """The command, in the forked process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    random.seed()
    os.fsync = os.fstat  # see tests/conftest.py
    gc.freeze()  # all that was imported, which collections would look through and so copy
    option, what, *rest = arguments
    if option == "-m":
        sys.argv = [what, *rest]
        sys.modules.pop(what, None)  # imported already, of which runpy would warn
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *rest]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
