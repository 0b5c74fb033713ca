"""The target of scripts/bench_online: half of the quickstart's layers, so that thousands of
requests fit an hour, trained until its text is whole again, and on the third domain
too."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from draftsmith.drafters.lm.pruned import pruned_target
from draftsmith.drafters.target.target import Target
from draftsmith.files import atomic_folder, write_json
from draftsmith.prompts.corpus import held_out
from scripts.bench.online.domains import DOMAINS
from scripts.demo.train_target import fit, mean_loss, pack
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
