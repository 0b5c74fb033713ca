"""Tokens a second of an unrolled loss, forward and backward, over padded and packed batches of one
set of texts; with `--learner`, CPU time of a learner's steps over batches of unsorted texts."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator

import torch

from draftsmith.distill.config import LearnConfig
from draftsmith.distill.learn.optimizer import CandidateOptimizer
from draftsmith.distill.learn.teachers import LearningRow, LiveTeacher
from draftsmith.distill.learn.text_states import TextStates
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.prompts.corpus import stdlib_code
from draftsmith.train.data.batches import BatchPlan, pack, weights_of
from draftsmith.train.data.dataset import TokenSequence, read_corpus
from draftsmith.train.data.roles import Row, padded_rows
from draftsmith.train.objective.depth_weights import Exponential
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.objective.unrolled_loss import unrolled_loss
from scripts.paths import ROOT

STEPS, DECAY = 4, 0.8


def texts_of_source(target: Target, max_length: int, count: int) -> list[TokenSequence]:
    """Lengths are log-uniform, as those of chats roughly are."""
    rng, tokenizer, texts = random.Random(0), target.tokenizer(), []
    documents = rng.choices(stdlib_code(), k=count)
    for number, document in enumerate(documents):
        length = round(16 * (max_length / 16) ** rng.random())
        ids = tokenizer.encode(document.text[: 12 * length])[:length]
        texts.append(
            TokenSequence(str(number), torch.tensor(ids), torch.arange(len(ids)) >= len(ids) // 4)
        )
    return texts


def batches(texts: list[TokenSequence], rows: int, row_length: int | None) -> Iterator[TextBatch]:
    lengths = [len(text.input_ids) for text in texts]
    plan = BatchPlan(
        lengths,
        batch_size=rows,
        seed=0,
        num_batches=10**9,
        rank=0,
        world_size=1,
        row_length=row_length,
    )
    for batch in plan:
        yield pack([[texts[at] for at in row] for row in batch])


def rate(
    drafter: torch.nn.Module, target: Target, source: Iterator[TextBatch], tokens: int
) -> tuple[float, float]:
    """(real tokens per second, share of the places that hold one) over at least so many tokens."""
    real = places = 0
    begun_s = time.perf_counter()
    for text in source:
        found = unrolled_loss(
            drafter, LiveSource(target), text, num_steps=STEPS, weighting=Exponential(DECAY)
        )
        found.total.backward()
        real += int(text.attention_mask.sum())
        places += text.attention_mask.numel()
        if real >= tokens:
            break
    return real / (time.perf_counter() - begun_s), real / places


def learner_steps(
    family: str, target: Target, texts: list[TokenSequence], options: argparse.Namespace
) -> None:
    """Prints places computed per trained token, padded and packed, and the packed steps' share of
    the padded ones' CPU time, in turns over the same batches of known states."""
    chance, drafter = random.Random(0), FAMILIES[family].create(OPTIONS[family](), target, seed=0)
    optimizer = CandidateOptimizer(drafter, LearnConfig(dtype="float32"))
    teacher = LiveTeacher(target, TextStates(target, 8 << 30))
    pairs = []
    for _ in range(options.batches):
        chosen = chance.sample(texts, options.rows)
        rows = [Row(one.input_ids.tolist(), weights_of(one).numpy()) for one in chosen]
        packed = teacher.batch([LearningRow(row, []) for row in rows])
        pairs.append((packed._replace(text=padded_rows(rows, target.device)), packed))
    places = [
        sum(pair[side].text.input_ids.numel() for pair in pairs)
        / sum(pair[side].tokens for pair in pairs)
        for side in (0, 1)
    ]
    ratios = []
    for turn in range(options.turns + 1):
        times_s = []
        for side in (0, 1):
            begun_s = time.process_time()
            for pair in pairs:
                optimizer.step(pair[side], lr=0.0)
            times_s.append(time.process_time() - begun_s)
        if turn:  # states are read in the first one
            ratios.append(times_s[1] / times_s[0])
    told = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"{family:<10} {places[0]:>10.2f} {places[1]:>10.2f}   {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=str(ROOT / "runs/quickstart/target"))
    parser.add_argument(
        "--data", help="folder of generate; by default pieces of the standard library's source"
    )
    parser.add_argument("--families", nargs="+", default=["eagle3", "draft-lm"])
    parser.add_argument("--max-length", type=int, default=1000)
    parser.add_argument(
        "--rows",
        type=int,
        default=8,
        help="padded rows a batch; packed batches hold as many tokens",
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=12000, help="of a turn")
    parser.add_argument("--learner", action="store_true", help="steps of distill's learner instead")
    parser.add_argument("--batches", type=int, default=6, help="of a learner's turn")
    options = parser.parse_args()
    target = Target.load(options.target)
    if options.data:
        limits = {
            "max_length": options.max_length,
            "vocab_size": target.vocab_size,
            "held_out_share": 0.0,
        }
        corpus = read_corpus(options.data, **limits)
        texts = corpus.train.first(2000)
    else:
        texts = texts_of_source(target, options.max_length, 2000)
    mean = statistics.mean(len(text.input_ids) for text in texts)
    packed_rows = max(1, round(options.rows * mean / options.max_length))
    print(f"{len(texts)} texts, {mean:.0f} tokens on average, {options.max_length} at most")
    if options.learner:
        print(
            f"{'family':<10} {'places computed per trained token':<21}   CPU time, packed / padded"
        )
        print(f"{'':<10} {'padded':>10} {'packed':>10}")
        for family in options.families:
            learner_steps(family, target, texts, options)
        return
    print(
        f"{'family':<10} {'padded tok/s':>13} {'packed tok/s':>13} "
        f"{'packed / padded, each turn':<32} filled, padded and packed"
    )
    for family in options.families:
        drafter = FAMILIES[family].create(OPTIONS[family](), target, seed=0)
        sources = [
            batches(texts, options.rows, None),
            batches(texts, packed_rows, options.max_length),
        ]
        for source in sources:
            rate(drafter, target, source, options.tokens // 4)
        turns = [
            [rate(drafter, target, source, options.tokens) for source in sources]
            for _ in range(options.turns)
        ]
        padded, packed = zip(*turns, strict=True)
        ratios = [two[0] / one[0] for one, two in turns]
        filled = " and ".join(
            f"{statistics.mean(share for _, share in side):.0%}" for side in (padded, packed)
        )
        told = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rates = [statistics.median(one for one, _ in side) for side in (padded, packed)]
        print(f"{family:<10} {rates[0]:>13.0f} {rates[1]:>13.0f} {told:<32} {filled}", flush=True)


if __name__ == "__main__":
    main()
