"""Updates of known worth put before the gate: some that help, some that were injected to harm; and
versions that got past it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.gate.gate import decide
from draftsmith.distill.gate.scoring import Scorer
from draftsmith.distill.gate.sequential import Evidence
from draftsmith.distill.learn.learner import Learner
from draftsmith.drafters.interface import TrainedDrafter
from scripts.bench.online.cells import FIRST, LEARNED, SECOND, Cell
from scripts.bench.online.domains import asks
from scripts.bench.online.setting import GATE, LEARN, MAX_LENGTH, Setting, learning
from scripts.bench.online.world import K, World

AWAY = 2 * 10**6  # numbers of these requests, away from those of any stream
SNAPSHOTS = 10  # good candidates of one run, one an update of the learner
# held-out requests of a trial, between two looks of the gate; trials of each candidate
PATIENCE, LOOK, TRIALS = 96, 24, 2
HARMFUL_STEPS = 8
Harm = Callable[[TrainedDrafter, Sequence[ServedText], Setting, int], None]


def run_gate(setting: Setting, cell: Cell) -> dict[str, Any]:
    """The live draft is the static one while traffic is of the second domain: much could be better,
    and all that is worse must not go live."""
    count, begin = int(cell.arguments["requests"]), AWAY
    static = setting.load(setting.draft(cell.seed))
    parts = []
    for size in (count, count, *[PATIENCE] * TRIALS):
        parts.append(setting.texts(static, SECOND, size, seed=cell.seed, begin=begin))
        begin += size
    taught, other, *judged = parts
    alpha = setting.alpha(static, other)
    candidates = [*good(setting, taught, cell.seed), *bad(setting, taught, cell.seed)]
    gains = [
        setting.alpha(one, other) - alpha if is_finite(one) else -math.inf for _, one in candidates
    ]
    trials = []
    for texts in judged:
        live = Scorer(static, setting.target, max_length=MAX_LENGTH)
        for (kind, candidate), gain in zip(candidates, gains, strict=True):
            decision, held_out = judge(live, candidate, texts)
            trials.append(
                {
                    "kind": kind,
                    "gain": gain if math.isfinite(gain) else None,
                    "decision": decision,
                    "held_out": held_out,
                }
            )
    return {
        "alpha": alpha,
        "trials": trials,
        "forced": [forced(setting, cell, name) for name in ("noise", "shuffled labels")],
    }


def judge(live: Scorer, candidate: TrainedDrafter, texts: Sequence[ServedText]) -> tuple[str, int]:
    """As the daemon looks at a candidate while held-out requests come in: the last decision, and
    after how many of them."""
    evidence, decision = Evidence(), "hold"
    for end in range(LOOK, len(texts) + 1, LOOK):
        window = texts[max(0, end - GATE.window) : end]
        decision = decide(live, candidate, window, GATE, max_depth=K, evidence=evidence).decision
        if decision != "hold":
            return decision, end
    return decision, len(texts)


def good(
    setting: Setting, texts: Sequence[ServedText], seed: int
) -> list[tuple[str, TrainedDrafter]]:
    """One run of the learner, copied after every update; what they gain is measured,
    not assumed."""
    learner = Learner(setting.load(setting.draft(seed)), setting.target, LEARN, seed=seed)
    found = []
    for update in range(SNAPSHOTS):
        begin = update * LEARN.fresh % len(texts)
        learner.update(texts[begin : begin + LEARN.fresh])
        snapshot = setting.load(setting.draft(seed))
        with learner.averaged() as judged:
            snapshot.load_state_dict(judged.state_dict())
        found.append(("update", snapshot))
    return found


def bad(
    setting: Setting, texts: Sequence[ServedText], seed: int
) -> list[tuple[str, TrainedDrafter]]:
    found = []
    for name, harm in HARMS.items():
        candidate = setting.load(setting.draft(seed))
        harm(candidate, texts, setting, seed)
        found.append((name, candidate))
    return found


def is_finite(drafter: torch.nn.Module) -> bool:
    return all(bool(torch.isfinite(parameter).all()) for parameter in drafter.parameters())


@torch.no_grad()
def poison(
    drafter: TrainedDrafter, texts: Sequence[ServedText], setting: Setting, seed: int
) -> None:
    trained(drafter)[seed % len(trained(drafter))].view(-1)[0] = math.nan


@torch.no_grad()
def add_noise(
    drafter: TrainedDrafter, texts: Sequence[ServedText], setting: Setting, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(drafter):
        parameter += 0.5 * parameter.std() * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def shuffle_weights(
    drafter: TrainedDrafter, texts: Sequence[ServedText], setting: Setting, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(drafter):
        order = torch.randperm(parameter.numel(), generator=generator)
        parameter.copy_(parameter.flatten()[order].view_as(parameter))


@torch.no_grad()
def forget_everything(
    drafter: TrainedDrafter, texts: Sequence[ServedText], setting: Setting, seed: int
) -> None:
    fresh = setting.load(setting.draft(seed, "cold"))
    drafter.load_state_dict(fresh.state_dict())


def shuffle_labels(
    drafter: TrainedDrafter, texts: Sequence[ServedText], setting: Setting, seed: int
) -> None:
    """Each text's tokens in another order: what follows what is no longer so."""
    generator = random.Random(seed)
    shuffled = [
        replace(text, tokens=generator.sample(text.tokens, len(text.tokens))) for text in texts
    ]
    train(drafter, shuffled, setting, seed, lr=LEARN.lr)


def leap(drafter: TrainedDrafter, texts: Sequence[ServedText], setting: Setting, seed: int) -> None:
    """A learning rate that is 100 times too high."""
    train(drafter, texts, setting, seed, lr=100 * LEARN.lr)


@torch.no_grad()
def reverse(
    drafter: TrainedDrafter, texts: Sequence[ServedText], setting: Setting, seed: int
) -> None:
    """As far as training goes, the other way."""
    before = [parameter.clone() for parameter in trained(drafter)]
    with torch.enable_grad():
        train(drafter, texts, setting, seed, lr=LEARN.lr)
    for parameter, start in zip(trained(drafter), before, strict=True):
        parameter.copy_(2 * start - parameter)


def train(
    drafter: TrainedDrafter, texts: Sequence[ServedText], setting: Setting, seed: int, *, lr: float
) -> None:
    config = LearnConfig(
        lr=lr,
        steps=HARMFUL_STEPS,
        unroll=LearnUnroll(steps=K),
        max_length=MAX_LENGTH,
        warmup_steps=1,
    )
    Learner(drafter, setting.target, config, seed=seed).update(texts)


def trained(drafter: TrainedDrafter) -> list[torch.nn.Parameter]:
    return [parameter for parameter in drafter.parameters() if parameter.requires_grad]


HARMS: dict[str, Harm] = {
    "NaN": poison,
    "noise": add_noise,
    "shuffled weights": shuffle_weights,
    "random weights": forget_everything,
    "shuffled labels": shuffle_labels,
    "100x learning rate": leap,
    "reversed update": reverse,
}


def forced(setting: Setting, cell: Cell, harm: str) -> dict[str, Any]:
    """A bad version published past the gate: how many requests does it draft until it is taken
    back?"""
    chosen = learning(LEARNED, int(cell.arguments["requests"]))
    with setting.room(f"forced-{cell.seed}") as folder:
        never = replace(chosen.gate, every=10**6)  # the watch alone decides
        world = World(
            setting.target,
            setting.draft(cell.seed),
            folder,
            replace(chosen.learn, fresh=10**6),
            gate=never,
            seed=cell.seed,
        )
        serving, victim = (
            setting.load(setting.draft(cell.seed)),
            setting.load(setting.draft(cell.seed)),
        )
        texts = setting.texts(serving, FIRST, 16, seed=cell.seed, begin=AWAY)
        HARMS[harm](victim, texts, setting, cell.seed)
        setting.publish(world.root, victim)
        world.follow()
        most = round(4 * GATE.window / GATE.held_out)
        for served, answer in enumerate(
            world.serve(asks(setting.prompts(cell.seed), [FIRST] * most, begin=AWAY))
        ):
            if world.live == 1 and answer.version == 1:
                return {
                    "harm": harm,
                    "requests": served,
                    "held_out": world.daemon.counters.held_out,
                }
        return {"harm": harm, "requests": None, "held_out": world.daemon.counters.held_out}
