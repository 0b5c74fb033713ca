"""A `TrainConfig` as transformers' `TrainingArguments`, and DeepSpeed's checkpoints joined for
another number of processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from draftsmith.drafters.target.device import Placement
from draftsmith.errors import UserError
from draftsmith.train.config import TrainConfig
from draftsmith.train.resolve import deepspeed_config, save_interval

# DeepSpeed's file that names the folder of the joined state.
LATEST = "latest_universal"


class DraftArguments(TrainingArguments):
    """`TrainingArguments` of ranks that can go on from a checkpoint on a CPU too."""

    @property
    def device(self) -> torch.device:
        """Without an index on a CPU: accelerate calls a rank's device `cpu:0`, and transformers
        5.16 loads the optimizer to it, which torch refuses."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device


def training_arguments(
    config: TrainConfig, placement: Placement, *, folder: Path, max_steps: int, moved: bool = False
) -> TrainingArguments:
    """`moved`: the run goes on from a checkpoint of another number of processes."""
    check_trackers(config.report_to)
    on_cpu = placement.device.type == "cpu"
    deepspeed = deepspeed_config(config.deepspeed)
    arguments = DraftArguments(
        output_dir=str(folder),
        max_steps=max_steps,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        adam_beta2=config.optim.beta2,
        max_grad_norm=config.optim.max_grad_norm,
        logging_steps=config.log_every,
        logging_first_step=True,
        # A lost run must be seen, not averaged over.
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=save_interval(config),
        # The one before the newest stays, in case a kill cuts the newest short.
        save_total_limit=2,
        eval_strategy="steps" if config.eval_every and config.eval_prompts else "no",
        eval_steps=config.eval_every or None,
        bf16=placement.bf16,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and placement.world_size > 1 else None,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=not on_cpu,
        deepspeed=reads_joined(deepspeed) if deepspeed is not None and moved else deepspeed,
        seed=config.seed,
        disable_tqdm=True,
        report_to=list(config.report_to) or "none",
        remove_unused_columns=False,
        log_level="error",
    )
    # With several devices and no launcher the Trainer would reach for nn.DataParallel, which splits
    # batches of tensors only and would not move the target; one device it is. `device` first:
    # reading it sets the count.
    if arguments.device.type == "cuda":
        arguments._n_gpu = 1
    return arguments


def reads_joined(deepspeed: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed config of a run that goes on from joined parts."""
    return deepspeed | {"checkpoint": {**deepspeed.get("checkpoint", {}), "load_universal": True}}


def check_trackers(names: tuple[str, ...]) -> None:
    installed = get_available_reporting_integrations()
    for name in names:
        if name not in installed:
            raise UserError(
                f"option 'report_to' names {name!r}, which is no tracker installed here "
                f"({', '.join(installed) or 'none'})"
            )


def join_parts(checkpoint: Path) -> None:
    """Joins the parts that each process wrote of a checkpoint. Takes as long as reading and writing
    the optimizer once; does nothing where it was done before."""
    if (checkpoint / LATEST).is_file():
        return
    parts = checkpoint / (checkpoint / "latest").read_text(encoding="utf-8").strip()
    command = [
        sys.executable,
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--inject_missing_state",
    ]
    command += ["--input_folder", str(parts), "--output_folder", f"{parts}_universal"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        lines = (done.stdout.strip() or "no message").split("\n")
        raise UserError(
            f"checkpoint {str(checkpoint)!r} cannot be joined for another number of processes "
            f"({lines[-1]}); start as many as "
            "wrote it"
        )
