"""Run by test_trl.py with TRL on its path: GRPO on a tiny target, with a draft's callback."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from draftsmith.fleet.rl import FollowPolicy

STEPS = 3


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(set(ids))) for ids in completion_ids]


def main(target: str, root: Path) -> None:
    follow = FollowPolicy(root / "policy", every=2, buffer=str(root / "buffer"))
    arguments = GRPOConfig(
        output_dir=str(root / "out"), max_steps=STEPS, per_device_train_batch_size=4,
        num_generations=2, max_completion_length=6, temperature=0.75, learning_rate=1e-2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        target,
        reward_funcs=follow.records(reward),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": f"def f{at}"} for at in range(8)]),
        callbacks=[follow],
    )
    trainer.train()
    trainer.model.save_pretrained(root / "last")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
