"""Acceptance of a frozen, an adapted and a followed draft while a policy is trained. Started by
scripts/bench_rl."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.files import write_json
from draftsmith.fleet.rl.revisions import PolicyRevisions
from draftsmith.progress import Progress
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.teacher_forced import evaluate_draft
from scripts.bench.markdown_table import header, line
from scripts.bench.rl.followed import FollowedDraft, K
from scripts.bench.rl.policy import Policy, Prompts, Rollout
from scripts.paths import ROOT

TARGET, DRAFT = ROOT / "scripts" / "quickstart_target", ROOT / "scripts" / "quickstart_draft"
FROZEN, ADAPTED, FOLLOWED = "frozen", "adapted once", "followed"
DRAFTS = (FROZEN, ADAPTED, FOLLOWED)
Row = dict[str, Any]


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_rl", description=__doc__)
    parser.add_argument("--updates", type=int, default=50, help="of the policy")
    parser.add_argument(
        "--adapt", type=int, default=10, help="updates after which the adapted draft stays"
    )
    parser.add_argument("--prompts", type=int, default=6, help="per update")
    parser.add_argument("--group", type=int, default=6, help="answers per prompt")
    parser.add_argument("--tokens", type=int, default=24, help="per answer")
    parser.add_argument("--lr", type=float, default=3e-4, help="of the policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    chosen = options(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(chosen.seed)
    setting = {name: value for name, value in vars(chosen).items() if name != "out"}
    rows: list[Row] = []
    begun_s = time.monotonic()
    progress = Progress("bench_rl", total=chosen.updates, unit="updates", stream=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(chosen, Path(name))
        for update in range(chosen.updates):
            rows.append(bench.update(update))
            progress.update(update + 1, summary(rows[-1]))
            if chosen.out is not None:
                # Kept from the first update on, whatever ends the run.
                write_json(
                    chosen.out,
                    {
                        "schema": 1, "setting": setting, "cores": os.cpu_count(), "torch": torch.__version__,
                        "seconds": round(time.monotonic() - begun_s), "rows": rows,
                    },
                )  # fmt: skip
    progress.close()
    print("\n".join(table(rows)))


class Bench:
    def __init__(self, chosen: argparse.Namespace, work: Path):
        self.chosen = chosen
        self.policy = Policy(TARGET, lr=chosen.lr)
        self.prompts = Prompts(self.policy.tokenizer, seed=chosen.seed)
        self.revisions = PolicyRevisions(work / "policy")
        self.revisions.write(0, self.policy.save)
        self.followed = FollowedDraft(self.revisions.target, DRAFT, work, seed=chosen.seed)
        self.adapted: int | None = None  # version of the draft that was adapted once

    def update(self, update: int) -> Row:
        """One update of the policy: rollouts, the score of each draft on them, a turn of the
        learner, a step, a new revision."""
        chosen = self.chosen
        if update == chosen.adapt:
            self.adapted = self.followed.version
        prompts = [one for one in self.prompts.take(chosen.prompts) for _ in range(chosen.group)]
        rollouts, counts = self.followed.roll_out(
            prompts, max_tokens=chosen.tokens, seed=chosen.seed * 10_000 + update
        )
        row: Row = {"update": update, "version": self.followed.version}
        row["drafts"] = {
            name: score(draft, self.followed.target, rollouts)
            for name, draft in self._drafts().items()
        }
        row["tau_of_engine"] = counts.tau
        self.followed.learn()
        rewards = self.policy.rewards(rollouts)
        row["reward"] = statistics.mean(rewards)
        row["entropy"] = self.policy.update(rollouts, rewards, chosen.group)
        self.revisions.write(update + 1, self.policy.save)
        self.followed.read()
        return row

    def _drafts(self) -> dict[str, TrainedDrafter]:
        live = self.followed.draft(self.followed.version)
        adapted = live if self.adapted is None else self.followed.draft(self.adapted)
        return {
            FROZEN: checkpoint.load(DRAFT, self.followed.target),
            ADAPTED: adapted,
            FOLLOWED: live,
        }


def score(draft: TrainedDrafter, target: Target, rollouts: Sequence[Rollout]) -> Row:
    """Exact expectation over rounds on these very texts, whatever drafted them."""
    sequences = [
        TokenSequence(
            str(index),
            torch.tensor(one.prompt + one.answer),
            torch.tensor([False] * len(one.prompt) + [True] * len(one.answer)),
        )
        for index, one in enumerate(rollouts)
    ]
    found = evaluate_draft(draft, target, sequences, temperature=1.0, k=K)
    return found.figures()


def summary(row: Row) -> str:
    found = ", ".join(f"{name} {one['tau']:.3f}" for name, one in row["drafts"].items())
    return f"reward {row['reward']:.3f}; tau: {found}"


def table(rows: Sequence[Row], parts: int = 5) -> list[str]:
    """A line per part of the updates: means of alpha of the first drafted token, and of tau."""
    lines = header(
        "updates", "reward", "entropy, nats", *(f"{name}: alpha_1, tau" for name in DRAFTS), "versions"
    )  # fmt: skip
    size = max(1, len(rows) // parts)
    for at in range(0, len(rows), size):
        part = rows[at : at + size]
        cells = [
            f"{mean(part, name, 'alpha_1'):.3f}, {mean(part, name, 'tau'):.3f}" for name in DRAFTS
        ]
        lines.append(
            line(
                f"{part[0]['update']} to {part[-1]['update']}",
                f"{statistics.mean(one['reward'] for one in part):.3f}",
                f"{statistics.mean(one['entropy'] for one in part):.2f}",
                *cells,
                f"{part[0]['version']} to {part[-1]['version']}",
            )
        )
    return lines


def mean(rows: Sequence[Row], name: str, figure: str) -> float:
    return statistics.mean(one["drafts"][name][figure] for one in rows)


if __name__ == "__main__":
    main(sys.argv[1:])
