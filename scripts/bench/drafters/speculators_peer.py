"""Trains an EAGLE-3 draft with speculators, in the interpreter that has it. Started by
scripts/bench_drafters.

Theirs: options and defaults, model, loss, packing, collation, optimizers, the loop of steps. Ours,
because their loop needs CUDA, a vLLM server for hidden states and a number of steps: the device,
the target's states computed live for the batch that is read, a budget of seconds, their linear
schedule over the share of it that is spent, weights saved in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hs_connectors import HiddenStatesTransfer
from speculators.model import SpeculatorModel
from speculators.models.eagle3.data import shift_batch
from speculators.train import trainer as their_trainer
from speculators.train.cli import build_draft_model, parse_vocab_mappings, set_seed
from speculators.train.config import TrainConfig
from speculators.train.data import ArrowDataset
from speculators.train.dataloader import _setup_dataloader
from speculators.train.trainer import Trainer, TrainerConfig
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

from scripts.bench.drafters.meter import Meter

WARMUP = 0.01  # theirs where none is given
FOREVER = 10**9


class BudgetSpent(Exception):
    pass


class LiveStates(HiddenStatesTransfer):
    """Taps and last state of the target for the samples of a batch, in one padded pass."""

    def __init__(self, target: torch.nn.Module, taps: list[int]):
        self.body, self.taps = target.get_decoder(), taps
        self.ready: dict[int, dict[str, torch.Tensor]] = {}
        self.last = torch.empty(0)
        # speculators norms the last state itself; transformers gives it normed only.
        self.body.norm.register_forward_pre_hook(self.keep_last)

    def keep_last(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.last = inputs[0]

    @torch.no_grad()
    def read(self, samples: dict[int, torch.Tensor]) -> None:
        rows = list(samples.values())
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.body.device)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(row) for row in rows], batch_first=True
        ).to(self.body.device)
        output = self.body(
            input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
        )
        states = torch.stack([*(output.hidden_states[tap] for tap in self.taps), self.last], dim=2)
        self.ready = {
            index: {"hidden_states": states[at, : len(row)], "token_ids": row}
            for at, (index, row) in enumerate(samples.items())
        }  # fmt: skip

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor]:
        return self.ready[file_idx]

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> None:
        return None


class LiveDataset(ArrowDataset):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.transfer.read({index: self.data[index]["input_ids"] for index in indices})
        return [self[index] for index in indices]


def main() -> None:
    """The job is a JSON file: target, rows, out, budget_s, seed and the flags of `speculators
    train`."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    out = Path(job["out"])
    config = TrainConfig.resolve(
        ["--verifier-name-or-path", job["target"], "--save-path", str(out / "run"), *job["flags"]]
    )
    args = argparse.Namespace(**config.flatten())
    set_seed(job["seed"])
    d2t, t2d, draft_vocab_size = parse_vocab_mappings(args)
    draft = build_draft_model(args, SpeculatorModel.registry["eagle3"], t2d, d2t, draft_vocab_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(
        job["target"], trust_remote_code=False, dtype=getattr(torch, args.hidden_states_dtype)
    )
    target = target.to(device).eval()
    loader = make_loader(job, args, draft, LiveStates(target, list(draft.target_layer_ids)))
    trainer = make_trainer(args, draft, loader, device)
    counts = train(trainer, job["budget_s"])
    draft.save_pretrained(out / "draft")
    (out / "trained.json").write_text(json.dumps(counts) + "\n", encoding="utf-8")


def make_loader(
    job: dict[str, Any], args: argparse.Namespace, draft: SpeculatorModel, states: LiveStates
) -> Any:
    rows = json.loads(Path(job["rows"]).read_text(encoding="utf-8"))
    data = Dataset.from_dict(rows | {"seq_len": [len(ids) for ids in rows["input_ids"]]})
    folder = Path(job["out"]) / "rows"
    data.with_format("torch").save_to_disk(str(folder))
    dataset = LiveDataset(
        args.total_seq_len,
        folder,
        transfer=states,
        hidden_states_dtype=getattr(torch, args.hidden_states_dtype),
    )
    return _setup_dataloader(
        dataset,
        args.total_seq_len,
        draft.config.transformer_layer_config.hidden_size,
        num_workers=0,
        num_target_layers=len(draft.target_layer_ids),
        preprocess=shift_batch,
        seed=job["seed"],
    )


def make_trainer(
    args: argparse.Namespace, draft: SpeculatorModel, loader: Any, device: str
) -> Trainer:
    if device == "cpu":
        # They look for an accelerator and count devices.
        their_trainer.get_local_rank = lambda: "cpu"
    call, _ = type(draft).get_trainer_kwargs(**vars(args))
    fields = {name: value for name, value in vars(args).items() if name in TrainerConfig._fields}
    fields |= {
        "num_epochs": FOREVER, "hidden_states_dtype": getattr(torch, args.hidden_states_dtype),
        "train_call_kwargs": call,
        "scheduler_type": "none", "max_steps": None, "log_freq": FOREVER,
    }  # fmt: skip
    trainer = Trainer(draft, TrainerConfig(**fields), loader)
    trainer.device_type = device
    trainer.rank = 1  # no progress bar
    trainer.global_step = 1  # step 0 is logged, which synchronises an accelerator
    return trainer


def train(trainer: Trainer, budget_s: float) -> dict[str, float]:
    meter = Meter()
    trainer.schedulers = [
        LambdaLR(optimizer, lambda step: linear(meter.seconds() / budget_s)) for optimizer in trainer.optimizers
    ]  # fmt: skip
    counts = {"steps": 0, "tokens": 0}
    collate = trainer.train_loader.collate_fn

    def counted(batch: list[Any]) -> Any:
        collated = collate(batch)
        counts["tokens"] += int((collated["document_ids"] != -1).sum())
        return collated

    def stepped() -> None:
        counts["steps"] += 1
        if meter.seconds() >= budget_s:
            raise BudgetSpent

    trainer.train_loader.collate_fn = counted
    meter.start()
    try:
        for epoch in range(FOREVER):
            trainer.train_epoch(epoch, step_callback=stepped)
    except BudgetSpent:
        pass
    return counts | meter.report()


def linear(share: float) -> float:
    """`get_linear_schedule_with_warmup` over what is spent of the budget."""
    return share / WARMUP if share < WARMUP else max(0.0, (1.0 - share) / (1.0 - WARMUP))


if __name__ == "__main__":
    main()
