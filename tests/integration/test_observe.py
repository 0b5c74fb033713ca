"""The proxy in front of a real server: its records are enough to learn and to gate from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.distill import command as daemon
from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
from draftsmith.distill.buffer.traffic import stitch
from draftsmith.drafters import checkpoint, versions
from draftsmith.fleet.config import ObserveConfig
from draftsmith.fleet.observe import command
from draftsmith.fleet.observe.exchange import Models, Observer, ProxyCounters
from draftsmith.fleet.observe.proxy import Proxy
from draftsmith.record import RoundRecord
from draftsmith.serve.config import EngineConfig

TEXT = {"max_tokens": 16, "temperature": 0.5}


class Proxied:
    def __init__(self, url: str, buffer: Path, config: ObserveConfig):
        self.counters = ProxyCounters()
        writer = BufferWriter(str(buffer), flush_s=60.0, flush_records=10**6)
        form = command.answers_of(config)
        self.observer = Observer(config, self.counters, writer, Models(url, None), form)
        listener = command.bind("127.0.0.1:0")
        self.server = command.server(Proxy(url, self.observer))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.observer.close()


@contextmanager
def proxied(url: str, buffer: Path, **options: Any) -> Iterator[Proxied]:
    config = ObserveConfig(url=url, buffer=str(buffer), **options)
    made = Proxied(url, buffer, config)
    try:
        yield made
    finally:
        made.close()


def read(buffer: Path) -> dict[str, list[RoundRecord]]:
    """Records by answer: servers number the requests of an answer in their own ways."""
    texts: dict[str, list[RoundRecord]] = {}
    for record in BufferReader(str(buffer)).read(max_records=10**6).records:
        texts.setdefault(record.request.rpartition("-")[0], []).append(record)
    return texts


@pytest.fixture
def made(loop: Callable[..., Any]) -> Any:
    return loop("eagle3")


@pytest.fixture
def url(made: Any, live_server: Callable[..., Any]) -> str:
    drafter = checkpoint.load(made.root / "draft", made.target)
    return live_server(
        made.target, drafter, EngineConfig(k=3), per_request_spec_decode_metrics="detailed"
    ).url


@pytest.mark.long
def test_a_draft_learns_from_observed_traffic(made: Any, url: str) -> None:
    """Rounds, ids and nothing else: the learner computes the target's distributions itself."""
    buffer = Path(made.config.buffer)
    with proxied(url, buffer, draft_version="1", sampler="probabilistic") as proxy:
        bodies = [{"prompt": ids, "return_token_ids": True, **TEXT} for ids in made.prompts(60, 0)]
        with httpx.Client(base_url=proxy.url, timeout=60) as http, ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(lambda one: http.post("/v1/completions", json=one).json(), bodies)
            )
    assert proxy.counters.answers == proxy.counters.with_steps == 60
    texts = [stitch(records) for records in read(buffer).values()]
    said = {
        tuple(body["prompt"] + one["choices"][0]["token_ids"]) for body, one in zip(bodies, answers)
    }
    assert {tuple(text.tokens) for text in texts if text} == said
    assert daemon.run(replace(made.config, learn=replace(made.config.learn, steps=40))) == 0
    newest = versions.latest(made.versions)
    assert newest == 2 and versions.read_manifest(made.versions, newest)["gate"]["gain"] > 0


@pytest.mark.long
def test_records_say_what_the_server_itself_records(
    made: Any, live_server: Callable[..., Any], tmp_path: Path
) -> None:
    """The same requests by the server's own records: the same rounds, of which ids of rejected
    tokens, p and q are not known."""
    drafter = checkpoint.load(made.root / "draft", made.target)
    own = BufferWriter(str(tmp_path / "own"), flush_s=60.0, flush_records=10**6)
    told = {"per_request_spec_decode_metrics": "detailed"}
    server = live_server(made.target, drafter, EngineConfig(k=3), sink=own, **told)
    with (
        proxied(server.url, tmp_path / "seen", target=made.config.target) as proxy,
        httpx.Client(base_url=proxy.url, timeout=60) as http,
    ):
        body = {**TEXT, "return_token_ids": True}
        for ids in made.prompts(6, 1):
            http.post("/v1/completions", json={"prompt": ids, **body, "temperature": 1.0})
        stream = {"prompt": made.prompts(1, 5)[0], **body, "stream": True}
        http.post("/v1/completions", json=stream)
    own.close()
    seen, recorded = read(tmp_path / "seen"), read(tmp_path / "own")
    assert len(seen) == 7 and set(seen) <= set(recorded)
    in_full = 0
    for request, records in seen.items():
        ours, theirs = stitch(records), stitch(recorded[request])
        assert ours is not None and theirs is not None and ours.tokens == theirs.tokens
        if not any(record.drafted for record in records):
            continue  # the stream, without its rounds
        in_full += 1
        assert ours.roles.tolist() == theirs.roles.tolist()
        for one, other in zip(records, recorded[request], strict=True):
            assert (one.position, one.committed) == (other.position, other.committed)
            assert len(one.drafted) == len(other.drafted)
            assert one.drafted[: one.accepted] == other.drafted[: one.accepted]
    assert in_full == 6
