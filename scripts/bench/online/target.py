"""The target of scripts/bench_online: half of the quickstart's layers, so that thousands of
requests fit an hour, trained until its text is whole again, and on the third domain
too."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.drafters.lm.draft_lm import pruned_target
from draftsmith.drafters.target.target import Target
from draftsmith.files import atomic_folder, write_json
from draftsmith.progress import Progress
from draftsmith.prompts.corpus import held_out
from scripts.bench.online.domains import DOMAINS
from scripts.paths import ROOT

SHIPPED = ROOT / "scripts" / "quickstart_target"
LAYERS = (0, 1, 4, 7)
LENGTH, LR = 192, 2e-3
ROWS = {"code": 3, "prose": 2, "headers": 3}  # of a batch


def make_target(out: Path, *, minutes: float, seed: int = 0) -> None:
    torch.manual_seed(seed)
    shipped = Target.load(str(SHIPPED), dtype=torch.float32)
    tokenizer, model = shipped.tokenizer(), pruned_target(shipped, LAYERS)
    model.set_attn_implementation("sdpa")
    documents = {name: make() for name, make in DOMAINS.items()}
    streams = {
        name: pack(tokenizer, [one.text for one in some if not held_out(one)])
        for name, some in documents.items()
    }
    unseen = {
        name: pack(tokenizer, [one.text for one in some if held_out(one)])
        for name, some in documents.items()
    }
    begun_s = time.monotonic()
    model.train()
    generator = torch.Generator().manual_seed(seed)
    steps = fit(model, streams, ROWS, length=LENGTH, minutes=minutes, lr=LR, generator=generator)
    seconds = time.monotonic() - begun_s
    model.eval()
    record = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers_of_quickstart_target": LAYERS, "steps": steps,
        "tokens": steps * LENGTH * sum(ROWS.values()), "seconds": round(seconds),
        "held_out_loss": {name: round(mean_loss(model, stream, LENGTH), 3) for name, stream in unseen.items()},
    }  # fmt: skip
    with atomic_folder(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_json(folder / "training.json", record)


def pack(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All documents in one stream, each closed by the end-of-text token."""
    stream: list[int] = []
    for encoded in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        stream.extend(encoded)
        stream.append(tokenizer.eos_token_id)
    return torch.tensor(stream, dtype=torch.int32)


def sample_batch(
    stream: torch.Tensor, rows: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    starts = torch.randint(len(stream) - length, (rows,), generator=generator)
    return torch.stack([stream[start : start + length] for start in starts.tolist()]).long()


@torch.no_grad()
def mean_loss(model: PreTrainedModel, stream: torch.Tensor, length: int) -> float:
    batches = stream[: len(stream) // length * length].view(-1, length)[:32].long()
    return sum(model(input_ids=rows, labels=rows).loss.item() for rows in batches.split(8)) / len(
        batches.split(8)
    )


def fit(
    model: PreTrainedModel,
    streams: dict[str, torch.Tensor],
    rows: dict[str, int],
    *,
    length: int,
    minutes: float,
    lr: float,
    generator: torch.Generator,
) -> int:
    """`rows` of each stream make a batch. Returns the number of steps."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
    )
    progress = Progress("target", total=1000, unit="permille")
    begun_s, step, loss_average = time.monotonic(), 0, math.log(model.config.vocab_size)
    fast_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    while (done := (time.monotonic() - begun_s) / (minutes * 60)) < 1:
        # The schedule follows the clock, so a slower machine still ends at a decayed learning rate.
        scale = min(1.0, (step + 1) / 50) * max(0.02, 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = lr * scale
        batch = torch.cat(
            [sample_batch(streams[name], count, length, generator) for name, count in rows.items()]
        )
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast_bf16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        loss_average += 0.02 * (loss.item() - loss_average)
        progress.update(int(done * 1000), f"step {step}, loss {loss_average:.3f}")
    progress.close()
    return step
