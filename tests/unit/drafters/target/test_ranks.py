"""What a process says that another one has left alone."""

from __future__ import annotations

import os

import pytest

from draftsmith import cli
from draftsmith.drafters.target import sharded

AGAIN = "see why it ended, and start all of them again"
SAVED = f"{AGAIN}: they go on from what is saved"


@pytest.mark.parametrize(
    "processes, command, last", [("1", "train", ""), ("2", "train", SAVED), ("2", "eval", AGAIN)]
)
def test_a_command_whose_group_loses_a_process_ends_with_a_sentence(
    processes: str,
    command: str,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
            cli.main([command])
        return
    with pytest.raises((SystemExit, RuntimeError)) as left:
        cli.main([command])
    said = capsys.readouterr().err
    assert isinstance(left.value, SystemExit) and left.value.code == sharded.FAILED
    assert said.count("\n") == 1
    assert said.startswith("draftsmith: error: rank 3 ends because another process has (Connection")
    assert said.endswith(f"{last}\n")
