"""tau by length of the context of drafts trained on short texts, on all lengths, and with a window.

The target is a byte-level Mistral whose layers have windows: what it computes at a position depends
on a bounded number of tokens before it, so it does not degrade behind the lengths that it was
trained on, and whatever degrades is the draft.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from draftsmith.config import build, merge, read_yaml
from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.prompts.corpus import stdlib_code
from draftsmith.train.command import run
from draftsmith.train.config import TrainConfig
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.teacher_forced import Evaluation, evaluate_draft
from scripts.bench.markdown_table import header, line
from scripts.paths import ROOT

SHORT, TARGET_WINDOW, ANSWER, K = 256, 128, 128, 4
HELD_OUT = 8  # every so manieth document is of the held-out texts
OPTIONS = {"optim": {"optimizer": "muon", "lr": 3e-3}, "unroll": {"steps": 3}}


class Recipe(NamedTuple):
    name: str
    mixed: bool  # texts of all lengths; else of `SHORT` tokens
    window: int | None
    file: str | None = None  # of options beside window and length, in `recipes`


RECIPES = (
    Recipe("short texts", False, None),
    Recipe("all lengths", True, None),
    Recipe("short texts, window", False, TARGET_WINDOW),
    Recipe("eagle3-long", True, TARGET_WINDOW, "eagle3-long.yaml"),
)


class States:
    """A target that keeps its states of the texts it has read, which all drafts are judged on."""

    def __init__(self, target: Target):
        self._target, self._kept = target, dict[tuple[bytes, tuple[int, ...]], Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def states(self, ids: torch.Tensor, mask: torch.Tensor, taps: tuple[int, ...]) -> Any:
        key = (ids.numpy().tobytes(), taps)
        if key not in self._kept:
            self._kept[key] = self._target.states(ids, mask, taps)
        return self._kept[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=int, default=16384, help="tokens, a power of two")
    parser.add_argument("--tokens", type=int, default=150_000, help="that each draft trains on")
    parser.add_argument("--target-steps", type=int, default=400, help="of 8 texts of 256 bytes")
    parser.add_argument("--texts", type=int, default=3, help="held-out texts of each length")
    parser.add_argument("--seed", type=int, default=0, help="of target, texts and drafts")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    chosen = parser.parse_args()
    lengths = [SHORT << step for step in range(int(math.log2(chosen.longest // SHORT)) + 1)]
    torch.manual_seed(chosen.seed)
    train, held_out = documents(chosen.seed)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        target = make_target(work / "target", train, chosen.target_steps, chosen.longest + ANSWER)
        drafts, seconds = {}, {}
        for recipe in RECIPES:
            begun_s = time.perf_counter()
            drafts[recipe.name] = trained(
                recipe, target, train, lengths, chosen.tokens, work, chosen.seed
            )
            seconds[recipe.name] = round(time.perf_counter() - begun_s, 1)
        report: dict[str, Any] = {
            "schema": 1,
            "settings": {**vars(chosen), "out": None, "k": K, "window": TARGET_WINDOW},
            "train_s": seconds,
            "lengths": [],
        }
        for length in lengths:
            report["lengths"].append(measure(length, target, drafts, held_out, chosen.texts))
            if chosen.out:  # what is measured so far: the longest texts take most of the time
                chosen.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


def documents(seed: int) -> tuple[bytes, bytes]:
    """Training and held-out bytes, of different modules in an order that the seed gives."""
    texts = [document.text.encode() for document in stdlib_code()]
    random.Random(seed).shuffle(texts)
    held_out = texts[::HELD_OUT]
    return b"".join(text for at, text in enumerate(texts) if at % HELD_OUT), b"".join(held_out)


def pieces(text: bytes, lengths: Sequence[int], seed: int) -> list[list[int]]:
    drawn = random.Random(seed)
    begins = [drawn.randrange(len(text) - length) for length in lengths]
    return [list(text[begin : begin + length]) for begin, length in zip(begins, lengths)]


def make_target(folder: Path, text: bytes, steps: int, num_positions: int) -> Target:
    config = MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=TARGET_WINDOW,
        max_position_embeddings=num_positions, bos_token_id=None, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    model = MistralForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        ids = torch.tensor(pieces(text, [SHORT] * 8, step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    print(f"target: {steps} steps, loss {loss.item():.3f} nats a byte", flush=True)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return Target.load(folder, dtype=torch.float32)


def tokenizer() -> PreTrainedTokenizerFast:
    """Token b is byte b."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    others = (code for code in range(256, 256 + 68))
    plain = {ord(letter): letter for letter in letters}
    vocab = {plain.get(byte) or chr(next(others)): byte for byte in range(256)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def trained(
    recipe: Recipe,
    target: Target,
    text: bytes,
    lengths: Sequence[int],
    tokens: int,
    work: Path,
    seed: int,
) -> TrainedDrafter:
    """A draft of one pass over `tokens` tokens: short texts four a step, or one text a step of each
    length in turn, with as many tokens of each."""
    share = tokens // len(lengths)
    each = (
        [length for length in lengths for _ in range(max(1, share // length))]
        if recipe.mixed
        else [SHORT] * (tokens // SHORT)
    )
    name = recipe.name.replace(", ", "-").replace(" ", "-")
    data = work / f"data-{name}"
    data.mkdir()
    rows = [
        {"name": str(at), "input_ids": ids, "loss_mask": [0, *[1] * (len(ids) - 1)]}
        for at, ids in enumerate(pieces(text, each, seed=1 + seed))
    ]
    pq.write_table(pa.Table.from_pylist(rows), data / "part-00000.parquet")
    given: dict[str, Any] = {
        "family": "eagle3", "target": target.name, "data": [str(data)], "out": str(work / name),
        "dtype": "float32", "epochs": 1, "max_length": max(lengths), "held_out": 0.0, "seed": seed,
        "eval_prompts": 0, "eagle3": {"window": recipe.window},
    }  # fmt: skip
    if recipe.file:
        given["max_length"] = 8 * TARGET_WINDOW  # as many windows as in the recipe
    else:
        given |= OPTIONS | {"batch_size": 1 if recipe.mixed else 4}
        given["eagle3"] |= {"norm_output": True}
    file = {} if recipe.file is None else read_yaml(ROOT / "recipes" / recipe.file)
    config = build(TrainConfig, merge(file, given))
    run(config)
    return checkpoint.load(Path(config.out), target)


def measure(
    length: int,
    target: Target,
    drafts: dict[str, TrainedDrafter],
    held_out: bytes,
    count: int,
) -> dict[str, Any]:
    """tau over answers at T = 1 that begin behind `length` tokens, and the target's loss on the
    last of them."""
    prompts = pieces(held_out, [length - ANSWER] * count, seed=length)
    answers = target.answer(
        prompts, max_new_tokens=ANSWER, temperature=1.0, batch_size=1, ignore_eos=True
    )
    kept: Any = States(target)
    texts = [sequence(str(at), *pair) for at, pair in enumerate(zip(prompts, answers))]
    found = {
        name: evaluate_draft(drafter, kept, texts, temperature=1.0, k=K, batch_size=1)
        for name, drafter in drafts.items()
    }
    print(f"{length}: " + ", ".join(f"{one.tau.value:.3f}" for one in found.values()), flush=True)
    return {
        "length": length,
        "target_loss": sum(losses(target, prompts)) / count,
        "drafts": {name: figures(one) for name, one in found.items()},
    }


def sequence(name: str, prompt: list[int], answer: list[int]) -> TokenSequence:
    ids = torch.tensor(prompt + answer)
    return TokenSequence(name, ids, torch.arange(len(ids)) > len(prompt))


@torch.no_grad()
def losses(target: Target, texts: Sequence[list[int]]) -> Iterator[float]:
    """Nats a byte of the last `ANSWER` tokens of each text."""
    for text in texts:
        ids = torch.tensor([text])
        _, hidden = target.states(ids, torch.ones_like(ids), ())
        count = min(ANSWER, len(text) - 1)
        logits = target.head(hidden[0, -count - 1 : -1])
        yield float(torch.nn.functional.cross_entropy(logits.float(), ids[0, -count:]))


def figures(found: Evaluation) -> dict[str, Any]:
    first = found.alpha[0]
    return {"tau": found.tau._asdict(), "alpha_1": None if first is None else first._asdict()}


def table(report: dict[str, Any]) -> str:
    """A row a length. A draft's column has tau, its 95 % interval, and tau beside that at the
    shortest length."""
    names = list(report["train_s"])
    lines = header("tokens before", "target's loss", *names)
    first = report["lengths"][0]["drafts"]
    for row in report["lengths"]:
        cells = []
        for name in names:
            tau = row["drafts"][name]["tau"]
            ratio = tau["value"] / first[name]["tau"]["value"]
            cells.append(f"{tau['value']:.2f} ({tau['low']:.2f} to {tau['high']:.2f}), {ratio:.2f}")
        lines.append(line(row["length"] - ANSWER, f"{row['target_loss']:.2f}", *cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
