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
    "on-policy": ("on_policy.share=0.5",),
}
FORWARD_KL = "forward KL"
# The same seed's eagle3 trained on for as long again: what pays for its decoding is meant for a
# draft that can already draft.
CONTINUED = ("on-policy", "tvd++")
# As eagle3's recipe, but for the draft's own options, which it has.
CONTINUED_BY = (
    "--batch-size",
    "2",
    "optim.optimizer=muon",
    "optim.lr=3e-3",
    "optim.warmup=0.05",
    "unroll.steps=3",
    "unroll.decay=0.8",
)
OURS, THEIRS, SPECFORGE = "draftsmith", "speculators", "specforge"
PEERS = (THEIRS, SPECFORGE)
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
# learning rate, 1e-3: what did best of those tried on this target (docs/benchmarks/drafters.md).
THEIR_RECIPE = ("--total-seq-len", "320", "--lr", "1e-2")
# One configuration for both: the same layer, the target's head kept, texts of a step, unrolled
# steps, optimizer, divergence and arithmetic. With one text there is nothing to pack, whose masked
# attention costs speculators much on a CPU.
EQUAL_TEXTS, EQUAL_STEPS = (8, 1), 4
EQUAL_OURS = (
    "eagle3.train_head=false",
    f"unroll.steps={EQUAL_STEPS}",
    "unroll.decay=1",
    "--dtype",
    "float32",
)
EQUAL_THEIRS = (
    "--optimizer", "adamw", "--ttt-steps", str(EQUAL_STEPS), "--loss-fn", "kl_div",
    "--no-norm-before-residual", "--no-norm-before-fc", "--no-norm-output",
)  # fmt: skip
EQUAL_MINUTES = 1 / 3
WARM_S = 15.0  # that SpecForge, which compiles, trains before it is measured


@dataclass(frozen=True)
class Cell:
    part: str  # families, objectives, continued, peers, equal, or served
    name: str
    seed: int
    trainer: str
    arguments: tuple[str, ...]  # recipes by their path in the repository
    minutes: float
    starts_from: str = ""  # the folder of a cell before it

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
    peers: Sequence[str]
    seeds: int
    minutes: float
    row_tokens: int  # of the longest text
    served: bool  # the first drafts by vLLM too
    warm_s: float = WARM_S

    def cells(self) -> Iterator[Cell]:
        """Seed by seed, so that an interrupted run has compared something, and what is compared is
        trained close together."""
        for seed in range(self.seeds):
            yield from self.equal(seed)
            if THEIRS in self.peers:
                yield Cell("peers", THEIRS, seed, THEIRS, THEIR_RECIPE, self.minutes)
            for family in self.families:
                yield self.ours("families", family, seed, family, recipe(family))
            for name in self.objectives:
                yield self.ours(
                    "objectives", name, seed, "eagle3", (*recipe("eagle3"), *OBJECTIVES[name])
                )
            if "eagle3" in self.families:
                yield from self.continued(seed)
            if self.served and seed == 0:
                yield from self.to_serve()

    def equal(self, seed: int) -> Iterator[Cell]:
        """One configuration for our trainer and each peer."""
        minutes = min(self.minutes, EQUAL_MINUTES)
        for texts in EQUAL_TEXTS if self.peers else ():
            size, tokens = f"{texts} a step", ("--total-seq-len", str(texts * self.row_tokens))
            flags = {
                THEIRS: (*EQUAL_THEIRS, *tokens),
                SPECFORGE: (str(texts), str(EQUAL_STEPS), str(self.warm_s)),
            }
            yield self.ours(
                "equal",
                f"{OURS}, {size}",
                seed,
                "eagle3",
                ("--batch-size", str(texts), *EQUAL_OURS),
                minutes,
            )
            for peer in self.peers:
                yield Cell("equal", f"{peer}, {size}", seed, peer, flags[peer], minutes)

    def continued(self, seed: int) -> Iterator[Cell]:
        chosen = [name for name in CONTINUED if name in self.objectives]
        for name in [FORWARD_KL, *chosen] if chosen else []:
            words = ("eagle3", *CONTINUED_BY, *OBJECTIVES.get(name, ()))
            yield Cell(
                "continued",
                name,
                seed,
                OURS,
                words,
                self.minutes,
                starts_from=f"families/eagle3/seed-{seed}",
            )

    def to_serve(self) -> Iterator[Cell]:
        if "eagle3" in self.families:
            yield Cell("served", OURS, 0, OURS, ("eagle3", *recipe("eagle3")), self.minutes)
        if THEIRS in self.peers:
            yield Cell("served", THEIRS, 0, THEIRS, THEIR_RECIPE, self.minutes)

    def ours(
        self,
        part: str,
        name: str,
        seed: int,
        family: str,
        arguments: tuple[str, ...],
        minutes: float | None = None,
    ) -> Cell:
        return Cell(part, name, seed, OURS, (family, *arguments), minutes or self.minutes)


def recipe(family: str) -> tuple[str, ...]:
    return (f"recipes/{family}-small.yaml",)


def is_recipe(word: str) -> bool:
    return word.endswith(".yaml")
