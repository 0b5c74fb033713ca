"""Parts that the cells of scripts/bench_online share: the target, each seed's drafts, and the score
of a draft."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from draftsmith import cli
from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import GateConfig, LearnConfig, LearnUnroll
from draftsmith.distill.gate.scoring import score
from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import ServingDrafter, TrainedDrafter
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.published import versions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from scripts.bench.online.cells import (
    COLD,
    HALF,
    HELD_OUT,
    LEARNED,
    NO_REPLAY,
    PERIODIC,
    RETURNING,
    VARIANTS,
    WARM,
)
from scripts.bench.online.domains import PROMPT_TOKENS, Ask, Prompts, asks
from scripts.bench.online.target import make_target
from scripts.bench.online.world import SAMPLING, Answer, K, Server, Texts
from scripts.demo.pad_target import target_of

MAX_LENGTH = 128
# A high rate for a small draft, and a long warm-up: the first steps on a few texts would cost it
# much of what it has learned.
LEARN = LearnConfig(lr=1e-3, warmup_steps=100, unroll=LearnUnroll(steps=K), max_length=MAX_LENGTH)
# Every 21 requests on average: 16 to learn from beside the quarter that is held out.
GATE = GateConfig()
TARGET = "target"  # folder of the trained target in that of the setting
PERIOD = 250  # requests between two retrainings, where learning is not continuous


@dataclass(frozen=True)
class Learning:
    learn: LearnConfig
    gate: GateConfig


def learning(name: str, requests: int) -> Learning:
    """`requests` after a shift: a short trial run retrains more often."""
    fresh = max(8, round(min(PERIOD, requests / 4) * (1 - GATE.held_out)))
    periodic = LearnConfig(
        lr=LEARN.lr,
        warmup_steps=LEARN.warmup_steps,
        unroll=LearnUnroll(steps=K),
        max_length=MAX_LENGTH,
        fresh=fresh,
        steps=fresh * LEARN.steps // LEARN.fresh,
    )  # as many steps per text
    return {
        LEARNED: Learning(LEARN, GATE),
        RETURNING: Learning(LEARN, GATE),
        HALF: Learning(replace(LEARN, batch=4), GATE),
        HELD_OUT: Learning(LEARN, GateConfig(fresh=False)),
        NO_REPLAY: Learning(replace(LEARN, replay=0.0), GATE),
        PERIODIC: Learning(periodic, GateConfig(every=1)),
        **{variant: Learning(varied(variant), GATE) for variant in VARIANTS},
    }[name]


def varied(variant: str) -> LearnConfig:
    chosen = VARIANTS[variant]
    return replace(LEARN, optimizer=chosen.optimizer, lr=chosen.rate * LEARN.lr)


@dataclass(frozen=True)
class Setting:
    """Target that serves and teaches, and the folder of everything that is kept. `parameters` is
    what the target is padded to."""

    target: Target
    work: Path
    parameters: str | None = None

    @property
    def cells(self) -> Path:
        """Folder of the finished cells."""
        return self.work if self.parameters is None else self.work / f"cells-{self.parameters}"

    def prompts(self, seed: int) -> Prompts:
        return Prompts(self.target.tokenizer(), seed=seed)

    def draft(self, seed: int, start: str = WARM) -> Path:
        folder = self.work / f"seed-{seed}" / start
        if not (folder / checkpoint.RECORD).is_file():
            {WARM: self._train, COLD: self._create}[start](folder, seed)
        return folder

    def load(self, folder: Path) -> TrainedDrafter:
        return checkpoint.load(folder, self.target, dtype=torch.float32)

    def data(self, seed: int) -> Path:
        """Answers of the target to prompts of code: what the warm draft was trained on."""
        return self.work / f"seed-{seed}" / "data"

    def _train(self, folder: Path, seed: int) -> None:
        draftsmith(
            "generate", "--target", self.work / TARGET, "--prompts", "stdlib:code", "--count", 768,
            "--batch", 32,
            "--prompt-tokens", PROMPT_TOKENS, "--max-tokens", 48, "--temperature",
            SAMPLING.temperature, "--seed", seed,
            "--out", self.data(seed),
        )  # fmt: skip
        draftsmith(
            "train", "eagle3", "--target", self.work / TARGET, "--data", self.data(seed), "--out",
            folder, "--seed", seed,
            "--steps", 400, "--batch-size", 8, "--eval-prompts", 0, "--log-every", 50,
            "optim.lr=3e-3", f"unroll.steps={K}",
        )  # fmt: skip

    def _create(self, folder: Path, seed: int) -> None:
        checkpoint.save(
            FAMILIES["eagle3"].create(Eagle3Options(), self.target, seed=seed), folder, self.target
        )

    def publish(self, root: Path, drafter: TrainedDrafter) -> None:
        """A version that no gate has seen."""
        versions.publish(
            root, lambda folder: checkpoint.save(drafter, folder, self.target),
            family=drafter.family,
            target=checkpoint.identity(self.target), parent=1, data_range={},
            gate={"reason": "by hand"},
        )  # fmt: skip

    @contextmanager
    def room(self, name: str) -> Iterator[Path]:
        """A folder for one experiment; nothing of it is kept."""
        folder = self.work / "room" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
        shutil.rmtree(folder)

    def served(
        self, drafter: ServingDrafter, some: Sequence[Ask], *, seed: int
    ) -> tuple[list[Answer], list[ServedText]]:
        """Answers, and the texts as records hold them."""
        texts = Texts()
        answers = list(Server(self.target, drafter, seed=seed, sink=texts).serve(some))
        return answers, texts.taken()

    def texts(
        self, drafter: ServingDrafter, domain: str, count: int, *, seed: int, begin: int
    ) -> list[ServedText]:
        """Answers to prompts that no stream asks: their numbers begin at `begin`."""
        return self.served(
            drafter,
            list(asks(self.prompts(seed), [domain] * count, begin=begin)),
            seed=seed + begin,
        )[1]

    def alpha(self, drafter: TrainedDrafter, texts: Sequence[ServedText]) -> float:
        """Exactly, at the positions that verification visited."""
        return float(
            np.concatenate(
                [
                    one.alpha
                    for one in score(
                        drafter, self.target, texts, max_depth=K, max_length=MAX_LENGTH
                    )
                ]
            ).mean()
        )


def draftsmith(*arguments: object) -> None:
    if cli.main([str(argument) for argument in arguments]) != 0:
        raise SystemExit(f"draftsmith {arguments[0]} failed; its message is above")


def open_setting(work: Path, *, target_minutes: float, parameters: str | None = None) -> Setting:
    """Setting with the trained target, padded to `parameters` where they are given."""
    folder = work / TARGET
    if not folder.exists():
        make_target(folder, minutes=target_minutes)
    served = target_of(work, parameters)
    return Setting(Target.load(str(served), dtype=torch.float32), work, parameters)
