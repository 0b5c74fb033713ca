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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.distill.buffer.buffer import BufferReader, Reading
from draftsmith.distill.buffer.traffic import OpenRequests, ServedText
from draftsmith.distill.config import (
    DistillConfig,
    GateConfig,
    LearnConfig,
    PoolConfig,
    RetentionConfig,
)
from draftsmith.distill.daemon import Daemon
from draftsmith.distill.status import Status
from draftsmith.distill.throttle import NoGuard, Throttle
from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.published import versions
from draftsmith.drafters.target.target import Target
from draftsmith.record import RecordSink, RoundRecord, SinkCounts
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.drafts.swap import Swap
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.requests.request import Request, RequestOptions
from draftsmith.serve.requests.route import LIVE
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.watch import VersionWatcher
from scripts.bench.online.domains import Ask

K = 3
BATCH = 16
SAMPLING = SamplingParams(temperature=0.7, max_tokens=48, ignore_eos=True)
NO_POOL = PoolConfig(most=0)
EVERY_VERSION = RetentionConfig(versions=0)  # is kept, since all are scored at the end
CYCLE = 8  # finished requests between two turns of the learner


@dataclass(frozen=True)
class Answer:
    """Outcome of one request."""

    number: int
    domain: str
    version: int  # live when it ended
    accepted: int
    tried: int  # drafted tokens whose prefix stood
    tokens: int
    passes: int  # of the target, the one that read the prompt included
    serve_s: float  # spent by the engine until it ended, of this thread's CPU time
    learn_s: float  # and by the learner
    draft: str = LIVE  # that drafted it

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Pipe(BufferReader, RecordSink):
    """Sink and reader in one: what the engine records, the daemon reads at its next turn."""

    share = 1.0
    counts = SinkCounts()

    def __init__(self, folder: Path):
        super().__init__(str(folder))
        self.waiting: list[RoundRecord] = []

    def put(self, record: RoundRecord) -> None:
        self.waiting.append(record)

    def close(self) -> None:
        """Nothing waits for a disk."""

    def forget(self, answer: str) -> int:
        """Nothing is stored."""
        return 0

    def read(self, *, max_records: int = 4096) -> Reading:
        records, self.waiting = self.waiting, []
        return Reading(records, {}, False, 0)


class Texts(RecordSink):
    """A sink that stitches what it is given; `taken` are the requests that are over."""

    share = 1.0
    counts = SinkCounts()

    def __init__(self) -> None:
        self.open = OpenRequests()

    def put(self, record: RoundRecord) -> None:
        self.open.add([record])

    def close(self) -> None:
        """As `Pipe.close`."""

    def forget(self, answer: str) -> int:
        """As `Pipe.forget`."""
        return 0

    def taken(self) -> list[ServedText]:
        return self.open.take(idle_s=0.0)


class Server:
    """An engine that is kept full; `between` is called after every `CYCLE` finished requests."""

    def __init__(
        self,
        target: Target,
        drafter: ServingDrafter,
        *,
        seed: int,
        sink: Any = None,
        version: int = 0,
        record_taps: int = 0,
        is_tagged: bool = True,
    ):
        self.is_tagged = is_tagged  # requests name their domain
        config = EngineConfig(
            k=K, max_batch=BATCH, max_queue=4 * BATCH, seed=seed, max_length=128,
            prefix_cache=False, record_taps=record_taps,
        )  # fmt: skip
        self.engine = build_engine(target, drafter, config, sink=sink, draft_version=str(version))
        self.serve_s = self.learn_s = 0.0

    def serve(
        self, asks: Iterable[Ask], between: Callable[[], None] = lambda: None
    ) -> Iterator[Answer]:
        """Answers in the order in which they end."""
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
                yield self._answer(request, running.pop(request))
                since += 1
            if since >= CYCLE:
                since = 0
                begun_s = time.thread_time()
                between()
                self.learn_s += time.thread_time() - begun_s

    def _submit(self, ask: Ask) -> Request:
        tag = ask.domain if self.is_tagged else ""
        return self.engine.submit(
            ask.prompt, SAMPLING, options=RequestOptions(text=False, request_class=tag)
        )

    def _answer(self, request: Request, ask: Ask) -> Answer:
        stats = request.speculation
        tried = sum(
            min(accepted + 1, offered)
            for accepted, offered in zip(stats.accepted, stats.offered, strict=True)
        )
        return Answer(
            ask.number, ask.domain, int(self.engine.stats.draft_version), sum(stats.accepted),
            tried,
            stats.num_committed, stats.num_passes, self.serve_s, self.learn_s, request.route.draft,
        )  # fmt: skip


class Unstarted(EngineLoop):
    """A loop whose engine is stepped by others: what is swapped in waits for the next round."""

    def swap(
        self, folder: str, version: str, *, draft: str = LIVE, timeout_s: float = 60.0
    ) -> Swap:
        return self.engine.drafts.prepare(folder, version, draft=draft)

    def retire(self, draft: str) -> None:
        self.engine.drafts.retire(draft)


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
        pipe: type[Pipe] = Pipe,
        record_taps: int = 0,
        pool: PoolConfig = NO_POOL,
        is_tagged: bool = True,
    ):
        config = DistillConfig(
            target=target.name, draft=str(draft), buffer=str(folder / "buffer"),
            versions=str(folder / "versions"),
            learn=learn, gate=gate, pool=pool, seed=seed, save_s=1e9, dtype="float32",
            retention=EVERY_VERSION,
        )  # fmt: skip
        self.target, self.root = target, folder / "versions"
        self.log = io.StringIO()
        self.daemon = Daemon(
            config, Status(self.root, self.log), Throttle(1.0, NoGuard(), threading.Event())
        )
        # the daemon's own target may be an outline, which cannot serve
        live = checkpoint.load(
            versions.folder_of(self.root, self.live), target, dtype=torch.float32
        )
        self.pipe = self.daemon.reader = pipe(folder / "buffer")
        self.server = Server(
            target, live, seed=seed, sink=self.pipe, version=self.live, record_taps=record_taps,
            is_tagged=is_tagged,
        )  # fmt: skip
        self.watcher = VersionWatcher(Unstarted(self.server.engine), self.root, serving=self.live)

    @property
    def live(self) -> int:
        return self.daemon.shared.live.version

    def serve(self, asks: Iterable[Ask]) -> Iterator[Answer]:
        return self.server.serve(asks, self.learn)

    def learn(self) -> None:
        """Until it has caught up: the server waits, so that the curve does not depend on how fast
        the machine learns."""
        self.daemon.cycle()
        self.follow()

    def follow(self) -> None:
        self.watcher.look()
