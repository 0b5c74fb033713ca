"""Trainings of scripts/bench_drafters: draft, trainer and arguments. A cell is one of them with a
seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.paths import ROOT

FAMILIES = tuple(
    sorted(path.name.removesuffix("-small.yaml") for path in ROOT.glob("recipes/*-small.yaml"))
)
# Of eagle3, beside the recipe's forward KL.
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "lk-alpha": ("divergence=lk-alpha",),
    "lk-hybrid": ("divergence=lk-hybrid",),
    "tv": ("divergence=tv",),
    "tvd++": ("divergence=tvd++",),
}
OURS, THEIRS = "draftsmith", "speculators"
# What a CPU needs of speculators: no Triton, no flex attention, no bfloat16.
ON_CPU = (
    "--loss-implementation",
    "eager",
    "--draft-attn-impl",
    "sdpa",
    "--hidden-states-dtype",
    "float32",
)
# Their defaults but for the tokens of a step, 8,192 of which would leave them a few steps, and the
# learning rate, 1e-3: what did best of those tried on this target.
THEIR_RECIPE = ("--total-seq-len", "320", "--lr", "1e-2")


@dataclass(frozen=True)
class Cell:
    part: str  # families, objectives or peers
    name: str
    seed: int
    trainer: str
    arguments: tuple[str, ...]  # recipes by their path in the repository
    minutes: float

    @property
    def folder(self) -> str:
        return f"{self.part}/{self.name}/seed-{self.seed}"

    def command(self) -> list[str]:
        return [str(ROOT / word) if is_recipe(word) else word for word in self.arguments]

    def to_dict(self) -> dict[str, Any]:
        """With digests of its recipes: what an older recipe trained is another cell."""
        recipes = {
            word: hashlib.sha256((ROOT / word).read_bytes()).hexdigest()[:16]
            for word in self.arguments
            if is_recipe(word)
        }
        return asdict(self) | {"arguments": list(self.arguments), "recipes": recipes}


@dataclass(frozen=True, kw_only=True)
class Plan:
    families: Sequence[str]
    objectives: Sequence[str]
    has_peer: bool
    seeds: int
    minutes: float

    def cells(self) -> Iterator[Cell]:
        """Seed by seed, so that an interrupted run has compared something, and what is compared is
        trained close together."""
        for seed in range(self.seeds):
            if self.has_peer:
                yield Cell("peers", THEIRS, seed, THEIRS, THEIR_RECIPE, self.minutes)
            for family in self.families:
                words = (family, *recipe(family))
                yield Cell("families", family, seed, OURS, words, self.minutes)
            for name in self.objectives:
                words = ("eagle3", *recipe("eagle3"), *OBJECTIVES[name])
                yield Cell("objectives", name, seed, OURS, words, self.minutes)


def recipe(family: str) -> tuple[str, ...]:
    return (f"recipes/{family}-small.yaml",)


def is_recipe(word: str) -> bool:
    return word.endswith(".yaml")
