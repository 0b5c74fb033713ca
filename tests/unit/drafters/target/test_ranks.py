"""What a process says that ends in a call of all ranks."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from draftsmith import cli
from draftsmith.drafters.target import sharded


@pytest.mark.parametrize(
    "error, told, traced",
    [
        (sharded.Gone("Connection closed"), "another process has (Connection closed)", False),
        (sharded.Gone(), "another process has ()", False),
        (RuntimeError("Connection reset by peer. Advice"), "(Connection reset by peer)", False),
        (
            RuntimeError("[/a/pair.cc:553] Connection closed by peer [::1]:1. Advice"),
            "rank 1 ends because another process has (Connection closed by peer [::1]:1); see why",
            False,
        ),
        (OSError("Connection reset by peer"), "failed in a call that all ranks make", True),
        (RuntimeError("a mistake"), "failed in a call that all ranks make", True),
    ],
)
def test_a_rank_that_ends_says_why(
    error: Exception,
    told: str,
    traced: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sharded.logging, "shutdown", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(SystemExit) as left, sharded.in_step():
        raise error
    assert left.value.code == sharded.FAILED and told in caplog.text
    assert ("Traceback" in caplog.text) == traced


SAVED = "start all of them again: they go on from what is saved\n"


@pytest.mark.parametrize(
    "command, last", [("distill", SAVED), ("plan", "start all of them again\n")]
)
def test_a_process_gone_at_a_message_of_the_first_one_gives_a_sentence(
    command: str, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outside of a call that all ranks make."""

    def end(status: int) -> None:
        raise SystemExit(status)

    def fail(_: object) -> int:
        with sharded.meeting():
            raise RuntimeError("Socket closed. Advice")

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(cli, "_dispatch", fail)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises((SystemExit, sharded.Gone)) as left:
        cli.main([command])
    said = capsys.readouterr().err
    assert (
        isinstance(left.value, SystemExit)
        and left.value.code == sharded.FAILED
        and said.count("\n") == 1
    )
    assert "rank 0 ends because another process has (Socket closed)" in said
    assert said.endswith(last)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_command_whose_group_loses_a_process_ends_with_a_sentence(
    processes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(status: int) -> None:
        raise SystemExit(status)

    def fail(_: object) -> int:
        try:
            raise RuntimeError("[/a/pair.cc:553] Connection closed by peer [::1]:1. Advice. GLHF!")
        except RuntimeError as error:
            raise RuntimeError("a library's own words") from error

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(cli, "_dispatch", fail)
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("RANK", "3")
    if processes == "1":
        with pytest.raises(RuntimeError, match="own words"):
            cli.main(["train"])
        return
    with pytest.raises((SystemExit, RuntimeError)) as left:
        cli.main(["train"])
    said = capsys.readouterr().err
    assert isinstance(left.value, SystemExit) and left.value.code == sharded.FAILED
    assert said.count("\n") == 1
    assert said.startswith("draftsmith: error: rank 3 ends because another process has (Connection")
    assert said.endswith(SAVED)
