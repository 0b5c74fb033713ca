"""Trains the quickstart's tokenizer and target (a small Llama) on standard-library source and
prose.

    python -m scripts.demo.train_target --out runs/target --minutes 4

The target that ships with the project was made by this script; its `training.json` holds the
command and the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.progress import Progress
from draftsmith.prompts.corpus import held_out, stdlib_code, stdlib_prose

SPECIAL_TOKENS = ["<|endoftext|>", "<|pad|>", "<|mask|>"]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0], pad_token=SPECIAL_TOKENS[1]
    )


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


def target_config(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size, hidden_size=256, intermediate_size=512, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0,
        pad_token_id=1,
    )  # fmt: skip


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
    fast_bf16 = is_fast_at_bf16()
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


def is_fast_at_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="time for the training loop, evaluation apart"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prose-share", type=float, default=0.125)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    domains = {"code": stdlib_code(), "prose": stdlib_prose()}
    seen = {
        name: [d.text for d in documents if not held_out(d)] for name, documents in domains.items()
    }
    unseen = {
        name: [d.text for d in documents if held_out(d)] for name, documents in domains.items()
    }
    tokenizer = train_tokenizer(seen["prose"] + seen["code"][::4], args.vocab_size)
    streams = {name: pack(tokenizer, texts) for name, texts in seen.items()}
    eval_streams = {name: pack(tokenizer, texts) for name, texts in unseen.items()}

    model = LlamaForCausalLM(target_config(args.vocab_size))
    prose_rows = round(args.rows * args.prose_share)
    begun_s = time.monotonic()
    step = fit(
        model, streams, {"code": args.rows - prose_rows, "prose": prose_rows}, length=args.length,
        minutes=args.minutes,
        lr=args.lr, generator=generator,
    )  # fmt: skip
    seconds = time.monotonic() - begun_s
    model.eval()
    record = {
        "command": f"python -m scripts.demo.train_target --minutes {args.minutes:g} --seed {args.seed}",
        "steps": step, "tokens": step * args.rows * args.length, "seconds": round(seconds),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(), "bf16": is_fast_at_bf16(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "held_out_loss": {name: round(mean_loss(model, s, args.length), 4) for name, s in eval_streams.items()},
    }  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
