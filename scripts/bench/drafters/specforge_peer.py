"""Trains an EAGLE-3 draft with SpecForge, in the interpreter that has it. Started by
scripts/bench_drafters and scripts/bench_train.

Theirs: the model (`sdpa` attention), its unroll and loss, the preparation and padding of samples,
the frozen head of the target, AdamW, the step and the loop over batches. Ours, because theirs needs
CUDA and a server or files for the target's states: the device, the states computed live for the
batch that is read, a budget of seconds, their own loss in PyTorch in place of its Triton kernel, no
wrapper of FSDP, float32, and the draft's head kept at the target's as the other trainers keep it.
What they compile is compiled before anything is measured.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from specforge.algorithms.eagle3 import model as their_model
from specforge.algorithms.eagle3.data import build_offline_collator, normalize_offline_sample
from specforge.core import loss as their_loss
from specforge.modeling.draft import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.controller import TrainerController, TrainerCore
from specforge.training.strategies.base import Eagle3TrainStrategy
from transformers import AutoModelForCausalLM, LlamaConfig

from scripts.bench.drafters.meter import Meter

FOREVER = 10**9
SHAPE = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip


class BudgetSpent(Exception):
    pass


class Batches:
    """Shuffled samples with the target's states, read for each batch in one padded pass."""

    def __init__(self, job: dict[str, Any], target: torch.nn.Module, budget_s: float):
        rows = json.loads(Path(job["rows"]).read_text(encoding="utf-8"))
        self.texts = list(zip(rows["input_ids"], rows["loss_mask"], strict=True))
        self.size, self.taps, self.budget_s = job["texts"], job["taps"], budget_s
        self.body, self.collate = target.get_decoder(), build_offline_collator()
        self.order = torch.Generator().manual_seed(job["seed"])
        self.meter, self.steps, self.tokens = Meter(), 0, 0
        self.spent: dict[str, float] = {}

    def __iter__(self) -> Iterator[TrainBatch]:
        order = torch.randperm(len(self.texts), generator=self.order).tolist()
        for begin in range(0, len(order) - self.size + 1, self.size):
            if self.meter.seconds() >= self.budget_s:
                self.spent = self.meter.report()
                raise BudgetSpent
            texts = [self.texts[index] for index in order[begin : begin + self.size]]
            tensors = self.collate(self.samples(texts))
            yield TrainBatch(
                [str(index) for index in order[begin : begin + self.size]],
                "eagle3",
                tensors,
                {"target_repr": "hidden_state"},
            )
            self.steps += 1
            self.tokens += sum(len(ids) for ids, _ in texts)

    @torch.no_grad()
    def samples(self, texts: list[tuple[list[int], list[int]]]) -> list[dict[str, torch.Tensor]]:
        rows = [torch.tensor(ids) for ids, _ in texts]
        device = self.body.device
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(row) for row in rows], batch_first=True
        ).to(device)
        output = self.body(
            input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
        )
        taps = torch.cat([output.hidden_states[tap] for tap in self.taps], dim=-1)
        return [
            normalize_offline_sample(
                {
                    "aux_hidden_state": taps[at, : len(row)],
                    "hidden_state": output.last_hidden_state[at, : len(row)],
                    "input_ids": row,
                    "loss_mask": torch.tensor(counts),
                },
                len(row),
            )
            for at, (row, (_, counts)) in enumerate(zip(rows, texts, strict=True))
        ]


def main() -> None:
    """The job is a JSON file: target, taps, rows, texts, steps, out, budget_s, warm_s, seed
    and lr."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        their_model.LogSoftmaxLoss.apply = their_loss._compute_loss
    target = AutoModelForCausalLM.from_pretrained(
        job["target"], dtype=torch.float32, trust_remote_code=False
    )
    target = target.to(device).eval().requires_grad_(False)
    fit(job, target, job["warm_s"])
    gc.collect()
    if device == "cpu":
        ctypes.CDLL(None).malloc_trim(0)
    batches = fit(job, target, job["budget_s"])
    counts = {"steps": batches.steps, "tokens": batches.tokens} | batches.spent
    Path(job["out"], "trained.json").write_text(json.dumps(counts) + "\n", encoding="utf-8")


def fit(job: dict[str, Any], target: torch.nn.Module, budget_s: float) -> Batches:
    batches = Batches(job, target, budget_s)
    controller = make_controller(job, target)
    batches.meter.start()
    with suppress(BudgetSpent):
        controller.fit(batches)
    return batches


def make_controller(job: dict[str, Any], target: torch.nn.Module) -> TrainerController:
    draft = make_draft(target).to(target.device)
    model = their_model.OnlineEagle3Model(
        draft_model=draft, length=job["steps"], attention_backend="sdpa"
    )
    head = TargetHead(job["target"])
    head.fc.weight = target.get_output_embeddings().weight
    backend = FSDPTrainingBackend(ParallelConfig(param_dtype=torch.float32))
    backend.prepare_model(model, wrap=False)
    backend.set_optimizer(
        BF16Optimizer(draft, lr=job["lr"], total_steps=FOREVER, lr_scheduler="constant")
    )
    strategy = Eagle3TrainStrategy(model, target_head=head, ploss_decay=1.0)
    core = TrainerCore(strategy, backend)
    return TrainerController(
        core, run_id="bench", output_dir=job["out"], log_interval=FOREVER, num_epochs=FOREVER
    )


def make_draft(target: torch.nn.Module) -> LlamaForCausalLMEagle3:
    config = LlamaConfig(
        **{name: getattr(target.config, name) for name in SHAPE},
        num_hidden_layers=1,
        draft_vocab_size=target.config.vocab_size,
        pretraining_tp=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    draft.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    draft.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
    draft.embed_tokens.requires_grad_(False)
    draft.lm_head.requires_grad_(False)
    return draft


if __name__ == "__main__":
    main()
