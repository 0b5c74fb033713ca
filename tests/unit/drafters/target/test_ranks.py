"""What a process says that ends in a call of all ranks."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from draftsmith.drafters.target import ranks


@pytest.mark.parametrize(
    "error, told, traced",
    [
        (ranks.Gone("Connection closed"), "another process has (Connection closed)", False),
        (ranks.Gone(), "another process has ()", False),
        (RuntimeError("Connection reset by peer. Advice"), "(Connection reset by peer)", True),
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
    monkeypatch.setattr(ranks.logging, "shutdown", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(SystemExit) as left, ranks.in_step():
        raise error
    assert left.value.code == ranks.FAILED and told in caplog.text
    assert ("Traceback" in caplog.text) == traced
