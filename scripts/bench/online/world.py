"""Server and learner of scripts/bench_online in one process: the real engine and the real daemon,
taking turns.

No thread, no file and no clock stands between them, so a stream of requests gives the same curve
again.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from draftsmith.distill.buffer.buffer import BufferReader, BufferReading
from draftsmith.distill.buffer.traffic import OpenRequests, ServedText
from draftsmith.distill.config import DistillConfig, GateConfig, LearnConfig, RetentionConfig
from draftsmith.distill.daemon import Daemon
from draftsmith.distill.status import Status
from draftsmith.distill.throttle import Throttle
from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.record import RecordSink, RoundRecord, SinkCounts
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.live_draft import Swap
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.requests.request import Request, RequestOptions
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.watch import VersionWatcher
from scripts.bench.online.domains import Ask

K = 3
BATCH = 16
SAMPLING = SamplingParams(temperature=0.7, max_tokens=48, ignore_eos=True)
EVERY_VERSION = RetentionConfig(versions=0)  # is kept, since all are scored at the end
CYCLE = 8  # finished requests between two turns of the learner


class Texts(RecordSink):
    """A sink that stitches what it is given; `taken` are the requests that are over."""

    share = 1.0
    counts = SinkCounts()

    def __init__(self) -> None:
        self.open = OpenRequests()

    def put(self, record: RoundRecord) -> None:
        self.open.add([record])

    def close(self) -> None:
        """Nothing waits for a disk."""

    def forget(self, answer: str) -> int:
        """Nothing is stored."""
        return 0

    def taken(self) -> list[ServedText]:
        return [text for text in self.open.take(idle_s=0.0) if text.is_scorable]


class Pipe(Texts, BufferReader):
    """Sink and reader in one: what the engine records, the daemon reads at its next turn, and a
    copy is stitched. `now_s` is the simulated time of the records, None the machine's own."""

    def __init__(self, folder: Path):
        Texts.__init__(self)
        BufferReader.__init__(self, str(folder))
        self.waiting: list[RoundRecord] = []
        self.now_s: float | None = None

    def put(self, record: RoundRecord) -> None:
        if self.now_s is not None:
            record.time_s = self.now_s
        self.waiting.append(record)
        super().put(record)

    def read(self, *, max_records: int = 4096) -> BufferReading:
        records, self.waiting = self.waiting, []
        return BufferReading(records, False, 0)


class Server:
    """An engine that is kept full; `between` is called after every `CYCLE` finished requests."""

    def __init__(
        self, target: Target, drafter: ServingDrafter, *, seed: int, sink: Any, version: int = 0
    ):
        config = EngineConfig(
            k=K, max_batch=BATCH, max_queue=4 * BATCH, seed=seed, max_length=128,
            prefix_cache=False,
        )  # fmt: skip
        self.engine = build_engine(target, drafter, config, sink=sink, draft_version=str(version))
        self.serve_s = self.learn_s = 0.0

    def serve(
        self, asks: Iterable[Ask], between: Callable[[], None] = lambda: None
    ) -> Iterator[int]:
        """Committed tokens of each request, in the order in which they end."""
        source, since = iter(asks), 0
        running: dict[Request, Ask] = {}
        while True:
            while len(running) < BATCH and (ask := next(source, None)) is not None:
                running[self._submit(ask)] = ask
            if not running:
                return
            begun_s = time.thread_time()
            self.engine.step()
            self.serve_s += time.thread_time() - begun_s
            for request in [request for request in running if request.finished]:
                del running[request]
                yield request.speculation.num_committed
                since += 1
            if since >= CYCLE:
                since = 0
                begun_s = time.thread_time()
                between()
                self.learn_s += time.thread_time() - begun_s

    def _submit(self, ask: Ask) -> Request:
        options = RequestOptions(text=False, request_class=ask.domain)
        return self.engine.submit(ask.prompt, SAMPLING, options=options)


class Unstarted(EngineLoop):
    """A loop whose engine is stepped by others: what is swapped in waits for the next round."""

    def swap(self, folder: str, version: str, *, timeout_s: float = 60.0) -> Swap:
        return self.engine.draft.prepare(folder, version)


class World:
    """A server that learns: the daemon has its turn between rounds, what it publishes is swapped in
    before the next one."""

    def __init__(
        self,
        target: Target,
        draft: Path,
        folder: Path,
        learn: LearnConfig,
        *,
        gate: GateConfig,
        seed: int,
    ):
        config = DistillConfig(
            target=target.name, draft=str(draft), buffer=str(folder / "buffer"),
            versions=str(folder / "versions"),
            learn=learn, gate=gate, seed=seed, save_s=1e9, dtype="float32",
            retention=EVERY_VERSION,
        )  # fmt: skip
        self.target, self.root = target, folder / "versions"
        self.log = io.StringIO()
        self.daemon = Daemon(config, Status(self.root, self.log), Throttle(1.0, threading.Event()))
        # the daemon's own target may be an outline, which cannot serve
        live = checkpoint.load(
            versions.folder_of(self.root, self.live), target, dtype=torch.float32
        )
        self.pipe = self.daemon.reader = Pipe(folder / "buffer")
        self.server = Server(target, live, seed=seed, sink=self.pipe, version=self.live)
        self.watcher = VersionWatcher(Unstarted(self.server.engine), self.root, serving=self.live)

    @property
    def live(self) -> int:
        return self.daemon.track.live.version

    def serve(self, asks: Iterable[Ask]) -> Iterator[int]:
        return self.server.serve(asks, self.learn)

    def learn(self) -> None:
        """Until it has caught up: the server waits, so that the curve does not depend on how fast
        the machine learns."""
        self.daemon.cycle()
        self.watcher.look()
