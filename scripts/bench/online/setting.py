"""Parts that the cells of scripts/bench_online share: the target, each seed's drafts, and the score
of a draft."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from draftsmith import cli
from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import GateConfig, LearnConfig, LearnUnroll
from draftsmith.distill.gate.scoring import score_drafters
from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import ServingDrafter, TrainedDrafter
from draftsmith.drafters.target.target import Target
from scripts.bench.online.domains import PROMPT_TOKENS, Prompts, asks
from scripts.bench.online.target import make_target
from scripts.bench.online.world import SAMPLING, K, Server, Texts

MAX_LENGTH = 128
# A high rate for a small draft, and a long warm-up: the first steps on a few texts would cost it
# much of what it has learned.
LEARN = LearnConfig(lr=1e-3, warmup_steps=100, unroll=LearnUnroll(steps=K), max_length=MAX_LENGTH)
# Every 21 requests on average: 16 to learn from beside the quarter that is held out.
GATE = GateConfig()
TARGET = "target"  # folder of the trained target in that of the setting


@dataclass(frozen=True)
class Setting:
    """Target that serves and teaches, and the folder of everything that is kept."""

    target: Target
    work: Path

    def prompts(self, seed: int) -> Prompts:
        return Prompts(self.target.tokenizer(), seed=seed)

    def draft(self, seed: int) -> Path:
        """Trained on answers to prompts of code."""
        folder = self.work / f"seed-{seed}" / "warm"
        if not (folder / checkpoint.RECORD).is_file():
            self._train(folder, seed)
        return folder

    def load(self, folder: Path) -> TrainedDrafter:
        return checkpoint.load(folder, self.target, dtype=torch.float32)

    def _train(self, folder: Path, seed: int) -> None:
        data = self.work / f"seed-{seed}" / "data"
        draftsmith(
            "generate", "--target", self.work / TARGET, "--prompts", "stdlib:code", "--count", 768,
            "--batch", 32,
            "--prompt-tokens", PROMPT_TOKENS, "--max-tokens", 48, "--temperature",
            SAMPLING.temperature, "--seed", seed,
            "--out", data,
        )  # fmt: skip
        draftsmith(
            "train", "eagle3", "--target", self.work / TARGET, "--data", data, "--out",
            folder, "--seed", seed,
            "--steps", 400, "--batch-size", 8, "--eval-prompts", 0, "--log-every", 50,
            "optim.lr=3e-3", f"unroll.steps={K}",
        )  # fmt: skip

    @contextmanager
    def room(self, name: str) -> Iterator[Path]:
        """A folder for one experiment; nothing of it is kept."""
        folder = self.work / "room" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
        shutil.rmtree(folder)

    def texts(
        self, drafter: ServingDrafter, domain: str, count: int, *, seed: int, begin: int
    ) -> list[ServedText]:
        """Answers to prompts that no stream asks: their numbers begin at `begin`."""
        texts = Texts()
        some = asks(self.prompts(seed), [domain] * count, begin=begin)
        for _ in Server(self.target, drafter, seed=seed + begin, sink=texts).serve(some):
            pass
        return texts.taken()

    def alphas(self, drafter: TrainedDrafter, texts: Sequence[ServedText]) -> list[np.ndarray]:
        """Exactly, at the positions of each text that verification visited."""
        found = score_drafters([drafter], self.target, texts, max_depth=K, max_length=MAX_LENGTH)[0]
        return [one.alpha for one in found]


def draftsmith(*arguments: object) -> None:
    if cli.main([str(argument) for argument in arguments]) != 0:
        raise SystemExit(f"draftsmith {arguments[0]} failed; its message is above")


def open_setting(work: Path, *, target_minutes: float) -> Setting:
    folder = work / TARGET
    if not folder.exists():
        make_target(folder, minutes=target_minutes)
    return Setting(Target.load(str(folder), dtype=torch.float32), work)
