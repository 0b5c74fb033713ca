"""The learner's status in a file, and over HTTP for Prometheus."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import httpx
import pytest

from draftsmith.client import parse
from draftsmith.distill.state import TOTALS
from draftsmith.distill.status import Status, StatusCollector, serve_metrics
from draftsmith.errors import UserError


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_numbers_that_json_lacks_and_a_log_that_cannot_be_written_are_no_trouble(
    tmp_path: Path,
) -> None:
    status = Status(tmp_path, FullDisk())
    status.event("a line that nobody will read")
    status.show("another", {"loss": float("nan")})
    shown = json.loads((tmp_path / "status.json").read_text(), parse_constant=pytest.fail)
    assert shown["loss"] is None


def test_a_learner_that_ends_leaves_word(tmp_path: Path) -> None:
    status = Status(tmp_path, io.StringIO())
    status.close()
    assert not (tmp_path / "status.json").exists()
    for _ in range(2):
        status.show("a line", {"updates": 3})
        assert "stopped" not in json.loads((tmp_path / "status.json").read_text())
        status.close()
        left = json.loads((tmp_path / "status.json").read_text())
        assert left["stopped"] and left["updates"] == 3


def test_the_status_is_served_as_it_is_now(tmp_path: Path) -> None:
    status = Status(tmp_path, io.StringIO())
    server = serve_metrics(StatusCollector(status), "127.0.0.1", 0)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as http:
            assert "draftsmith_learner" not in http.get("/metrics").text
            for updates in (3, 4):
                status.show(
                    "a line",
                    {
                        "updates": updates,
                        "loss": 0.5,
                        "quarantined": True,
                        "alpha_training": [0.1],
                        "live": None,
                    },
                )
                found = parse(http.get("/metrics").text)
                assert found.total("draftsmith_learner_updates_total") == updates
                assert (
                    found.total("draftsmith_learner_loss") == 0.5
                    and found.total("draftsmith_learner_quarantined") == 1
                )
                assert not found.has("draftsmith_learner_live") and not found.has(
                    "draftsmith_learner_alpha_training"
                )
    finally:
        server.close()
    assert "updates" in TOTALS and "window" not in TOTALS


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for port in (taken.getsockname()[1], 70000):
            with pytest.raises(UserError, match="--status-port"):
                serve_metrics(StatusCollector(Status(tmp_path, io.StringIO())), "127.0.0.1", port)
