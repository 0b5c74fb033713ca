"""From a request over HTTP to what is left of it in the buffer and with the learner."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from draftsmith.distill import command as daemon
from draftsmith.distill.buffer import buffer
from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
from draftsmith.distill.buffer.folder import ShardFolder, mark_forgotten
from draftsmith.distill.config import GateConfig, LearnConfig, LearnUnroll
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.record import hashed_answer
from draftsmith.serve.config import EngineConfig
from tests.waiting import wait_until

BODY = {"model": "tiny", "max_tokens": 8, "ignore_eos": True, "temperature": 1.0}


def test_a_client_has_all_choices_of_its_answer_forgotten(
    target: Target, live_server: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer, "SETTLE_S", 0.1)
    writer = BufferWriter(str(tmp_path), flush_s=0.01)
    server = live_server(target, Suffix(), EngineConfig(k=3), sink=writer, api_key=("key",))
    key = {"authorization": "Bearer key"}
    prompt = [7, 8, 7, 8, 7]
    body = BODY | {"prompt": prompt, "n": 2}
    first, second = (
        server.http.post("/v1/completions", json=body, headers=key).json() for _ in range(2)
    )

    def stored() -> list[str]:
        return [one.request for one in BufferReader(str(tmp_path)).read().records if one.last]

    wait_until(lambda: len(stored()) >= 4)
    path = f"/v1/learn/{first['id']}"
    assert server.http.delete(path).status_code == 401 and len(stored()) == 4
    assert server.http.delete(path, headers=key).status_code == 204
    assert {name.partition("-")[0] for name in stored()} == {hashed_answer(second["id"])}
    assert len(stored()) == 2
    again = server.http.delete(path, headers=key)
    assert again.status_code == 404 and again.json()["error"]["code"] == "not_recorded"
    monkeypatch.setattr(ShardFolder, "put", refuse)
    assert server.http.delete(path, headers=key).status_code == 503
    monkeypatch.undo()
    writer.close()
    told = server.http.get("/openapi.json").json()["paths"]["/v1/learn/{answer}"]["delete"]
    assert set(told["responses"]) == {"204", "401", "404", "503"} and told["security"]


def refuse(self: ShardFolder, name: str, data: bytes) -> None:
    raise OSError(28, "No space left on device")


def test_a_server_that_records_nothing_says_so(target: Target, live_server: Callable) -> None:
    refused = live_server(target, None, EngineConfig()).http.delete("/v1/learn/cmpl-a")
    assert refused.status_code == 404
    assert "nothing is recorded" in refused.json()["error"]["message"]


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


LEARNING = LearnConfig(steps=1, fresh=2, batch=2, unroll=LearnUnroll(steps=2))


def learn(made: Any, buffer: Path) -> Callable[[], int]:
    """Traffic in `buffer`, and the daemon's run over what is new there."""
    gate = GateConfig(requests=2, window=4)
    made.config = replace(made.config, buffer=str(buffer), learn=LEARNING, gate=gate)
    made.serve(12)
    return lambda: daemon.run(made.config)


def saved(made: Any) -> set[str]:
    (state,) = (made.versions / "learner").glob("state-*")
    tables = [pq.read_table(path) for path in state.glob("*.parquet")]
    return {name for table in tables for name in table["request"].to_pylist()}


def test_a_learner_drops_what_is_forgotten_from_its_state_on_disk(
    loop: Callable[..., Any], tmp_path: Path
) -> None:
    made = loop()
    run = learn(made, tmp_path / "buffer")
    assert run() == 0
    held = saved(made)
    victim, _, _ = sorted(held)[0].partition("-")
    mark_forgotten(ShardFolder(str(tmp_path / "buffer")), victim)
    assert run() == 0
    assert saved(made) == {name for name in held if not name.startswith(victim)} != held


def test_from_a_buffer_in_memory_no_record_reaches_a_disk(
    loop: Callable[..., Any], memory: Path
) -> None:
    made = loop()
    assert learn(made, memory)() == 0
    assert saved(made) == set() and list(memory.glob("*.parquet"))
