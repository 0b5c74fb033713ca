"""Locks of folders among processes, and the end of a server by a signal before it listens."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvicorn

from draftsmith.errors import UserError
from draftsmith.lock import folder_lock, sigterm_ends

HOLD = """
import sys
from draftsmith.lock import folder_lock
with folder_lock(sys.argv[1], "writer"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_holds_a_folder_and_a_dead_one_never_does(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "a"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(
        UserError, match=rf"^to '.*/a' is in use by another writer .process {holder.pid} on "
    ):
        folder_lock(tmp_path / "a", "writer", option="to").__enter__()
    with folder_lock(tmp_path / "a", "reader"), folder_lock(tmp_path / "b", "writer"):
        pass
    holder.kill()
    holder.communicate()
    for _ in range(2):
        with folder_lock(tmp_path / "a", "writer"):
            assert (tmp_path / "a" / "writer.lock").exists()
    assert list((tmp_path / "a").iterdir()) == []


def test_the_file_of_a_holder_that_ended_between_is_not_taken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, honest = tmp_path / "writer.lock", fcntl.flock

    def late(descriptor: int, kind: int) -> None:
        monkeypatch.setattr(fcntl, "flock", honest)
        path.unlink()
        honest(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with folder_lock(tmp_path, "writer"):
        assert path.is_file()
        with pytest.raises(UserError, match="in use by another writer"):
            folder_lock(tmp_path, "writer").__enter__()


@pytest.mark.parametrize("number, is_refused", [(errno.ENOLCK, False), (errno.EIO, True)])
def test_a_file_system_without_locks_goes_without(
    number: int, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fails)
    if is_refused:
        with pytest.raises(UserError, match=r"cannot be written to .Input/output error"):
            folder_lock(tmp_path, "writer").__enter__()
    else:
        with folder_lock(tmp_path, "writer"):
            pass


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^out '.*file/a' cannot be written to"):
        folder_lock(tmp_path / "file" / "a", "writer").__enter__()


@pytest.mark.timeout(30)
def test_a_signal_before_a_server_listens_ends_it() -> None:
    server = uvicorn.Server(uvicorn.Config(lambda: None, port=0, lifespan="off", log_level="error"))
    with sigterm_ends(server):
        os.kill(os.getpid(), signal.SIGTERM)
        server.run()
    assert server.should_exit
