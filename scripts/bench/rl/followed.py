"""The real learner beside a policy, in one process and in turn: it reads each revision of the policy,
engines roll out with its live draft, and it learns from their records."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from draftsmith.distill.config import (
    DistillConfig,
    GateConfig,
    LearnConfig,
    LearnUnroll,
    RetentionConfig,
)
from draftsmith.distill.daemon import Daemon
from draftsmith.distill.status import Status
from draftsmith.distill.throttle import NoGuard, Throttle
from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.published import versions
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from scripts.bench.online.world import Pipe
from scripts.bench.rl.policy import Rollout

K = 3
MAX_LENGTH = 96
LEARN = LearnConfig(
    lr=1e-3, warmup_steps=20, unroll=LearnUnroll(steps=K), max_length=MAX_LENGTH, fresh=8
)
# A revision a minute leaves no time for more than one decision each; prompts repeat.
GATE = GateConfig(every=1, requests=8, window=24, held_out_by="request", floor=0.1)


class FollowedDraft:
    """`target` and `live` are those of the revision that was read last."""

    def __init__(self, current: Path, draft: Path, work: Path, *, seed: int):
        self.root = work / "versions"
        self.pipe = Pipe(work / "buffer")
        self.log = open(work / "learner.log", "w", encoding="utf-8")  # noqa: SIM115
        self.config = DistillConfig(
            target=str(current), draft=str(draft), buffer=str(work / "buffer"),
            versions=str(self.root), learn=LEARN, gate=GATE, retention=RetentionConfig(versions=1000),
            seed=seed, save_s=1e9, dtype="float32",
        )  # fmt: skip
        self.daemon: Daemon | None = None
        self.read()

    def read(self) -> None:
        """Reads the newest revision, as the learner's command does."""
        left, before = "", None
        if self.daemon is not None:
            left, before = self.daemon.target.revision, self.daemon.shared.predict()
            self.daemon.save()
        status = Status(self.root, self.log)
        self.daemon = Daemon(self.config, status, Throttle(1.0, NoGuard(), threading.Event()))
        self.daemon.reader = self.pipe
        if left:
            self.daemon.predict(left, before)

    @property
    def learner(self) -> Daemon:
        assert self.daemon is not None
        return self.daemon

    @property
    def target(self) -> Target:
        return self.learner.target

    @property
    def version(self) -> int:
        return self.learner.shared.live.version

    def draft(self, version: int) -> TrainedDrafter:
        return checkpoint.load(versions.open_version(self.root, version), self.target)

    def roll_out(
        self, prompts: Sequence[list[int]], *, max_tokens: int, seed: int
    ) -> tuple[list[Rollout], AcceptanceCounts]:
        """Answers at temperature 1, drafted by the live version, and what became of its drafts."""
        config = EngineConfig(
            k=K, seed=seed, max_batch=32, max_length=MAX_LENGTH, prefix_cache=False
        )
        engine = build_engine(
            self.target, self.draft(self.version), config, sink=self.pipe,
            draft_version=str(self.version),
        )  # fmt: skip
        sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
        done = engine.generate(prompts, sampling, text=False)
        counts = AcceptanceCounts()
        for one in done:
            found = one.speculation
            counts.add(found.offered, found.accepted, found.committed)
        return [Rollout(list(one.prompt), list(one.tokens)) for one in done], counts

    def learn(self) -> None:
        """Until nothing is left to do."""
        while self.learner.cycle():
            pass
