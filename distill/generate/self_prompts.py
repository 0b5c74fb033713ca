"""Prompts that the target writes itself, behind the empty user turn of its chat template (Magpie,
arXiv 2406.08464).

They are drawn and stored as answers are, in a folder within the dataset's. Those that are kept
follow from the seed alone: each is judged beside the ones before it.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from draftsmith.chat_answers import ChatAnswers
from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate.answers import LOCK, SELF_PROMPTS, AnswerFolder, Processes
from draftsmith.distill.generate.prompts import SELF_PROMPTS_TEMPERATURE, SELF_PROMPTS_TOP_P, Prompt
from draftsmith.distill.generate.steps import (
    NewAnswers,
    Reference,
    answer_all,
    describe,
    new_writer,
)
from draftsmith.distill.generate.writers import seed_of
from draftsmith.errors import UserError
from draftsmith.files import atomic_path

FILE = "prompts.jsonl"  # those that are kept
MIN_TOKENS = 4
MIN_DISTINCT = 0.7  # of the runs of three tokens
NEAR = 0.7  # common pairs of neighbouring tokens, of all pairs of two texts
MIN_KEPT = 0.05  # with a lower share the run ends
PROBED = 64  # prompts before it may end so
SMALLEST_SHARD = 16


class KeptPrompts:
    """Texts in the order of their numbers, up to `most` of them, and why others were dropped."""

    def __init__(self, form: ChatAnswers, most: int):
        self.form, self.turn, self.most = form, form.user_turn(), most
        self.texts: list[str] = []
        self.dropped: Counter[str] = Counter()
        self._exact: set[str] = set()
        self._pairs: list[frozenset[tuple[int, int]]] = []
        self._with: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    @property
    def seen(self) -> int:
        return len(self.texts) + self.dropped.total()

    @property
    def full(self) -> bool:
        return len(self.texts) == self.most

    def add(self, written: list[int]) -> None:
        """Judges what the target wrote behind the empty turn."""
        if self.full:
            return
        text, reason = self._read(written)
        reason = reason or self._repeats(text)
        if reason:
            self.dropped[reason] += 1
        else:
            self.texts.append(text)

    def _read(self, written: list[int]) -> tuple[str, str]:
        """Text, and why it is dropped."""
        tokenizer, turn = self.form.tokenizer, self.turn
        size = next((at for at, one in enumerate(written) if one in turn.ends), len(written))
        text = tokenizer.decode(written[:size])
        body, marked, _ = text.partition(turn.mark) if turn.mark else (text, "", "")
        if size == len(written) and not marked:
            return "", "without an end"
        text = body.strip()
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if self.form.special & {*tokens, *written[:size]} or "\ufffd" in text:
            return "", "with special tokens"
        runs = list(zip(tokens, tokens[1:], tokens[2:]))
        if len(tokens) < MIN_TOKENS or not any(letter.isalnum() for letter in text):
            return "", "too short"
        if len(set(runs)) < MIN_DISTINCT * len(runs):
            return "", "repetitive"
        return text, ""

    def _repeats(self, text: str) -> str:
        """Name of what it repeats; remembers it otherwise."""
        plain = " ".join(text.casefold().split())
        if plain in self._exact:
            return "duplicate"
        tokens = self.form.tokenizer.encode(plain, add_special_tokens=False)
        pairs = frozenset(itertools.pairwise(tokens))
        # Two sets so alike share one of so many pairs that come first in any one order.
        begin = len(pairs) - math.ceil(NEAR * len(pairs)) + 1
        first = sorted(pairs, reverse=True)[:begin]
        for other in {number for pair in first for number in self._with[pair]}:
            if len(pairs & self._pairs[other]) >= NEAR * len(pairs | self._pairs[other]):
                return "near duplicate"
        self._exact.add(plain)
        self._pairs.append(pairs)
        for pair in first:
            self._with[pair].append(len(self._pairs) - 1)
        return ""


def write_prompts(
    config: GenerateOptions, reference: Reference, new_answers: NewAnswers, processes: Processes
) -> tuple[Path, dict[str, Any]]:
    """File of the prompts, and its entry in the provenance of the dataset.

    Raises:
        UserError: the template has no turn to write in, or next to nothing is kept.
    """
    kept = KeptPrompts(_form_of(config, reference), config.self_prompts or 0)
    asking = asking_of(config)
    found = {entry.name for entry in Path(config.out).glob("*")} - {f"{LOCK}.lock"}
    if found and SELF_PROMPTS not in found:
        raise UserError(
            f"{config.out!r} was not started with --self-prompts; give an empty or new folder as "
            "--out"
        )
    prompt = Prompt("", False, kept.turn.head, ends=kept.turn.ends)
    writer = new_writer(
        asking, reference, new_answers, len(prompt.ids) + config.self_prompts_tokens
    )
    shards = math.ceil((kept.most / MIN_KEPT + PROBED) / asking.shard)
    prompts = [prompt] * (shards * asking.shard)
    provenance = describe(asking, reference, [prompt]) | writer.provenance
    folder = processes.leader_first(
        lambda: AnswerFolder(
            asking.out,
            total=len(prompts),
            size=asking.shard,
            has_distributions=False,
            provenance=provenance,
        )
    )
    begin, end = 0, min(processes.count, shards)
    while not kept.full:
        own = [shard for shard in processes.shards(folder) if begin <= shard < end]
        answer_all(asking, writer, None, prompts, folder, own, unit="prompts")
        processes.wait()
        for written in itertools.chain.from_iterable(
            _written_in(folder.part(shard)) for shard in range(begin, end)
        ):
            kept.add(written)
        _check_kept(config, kept)
        share = max(len(kept.texts), 1) / kept.seen
        more = math.ceil((kept.most - len(kept.texts)) / share / asking.shard)
        begin, end = end, min(end + more, shards)
    del writer
    gc.collect()  # frees the keys and values of its engine
    path = Path(asking.out) / FILE
    if processes.leads:
        print(_told(kept))
        with folder.writing(), atomic_path(path) as temporary:
            lines = (json.dumps({"prompt": text}, ensure_ascii=False) for text in kept.texts)
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    processes.wait()
    record = {
        "count": kept.most,
        "temperature": SELF_PROMPTS_TEMPERATURE,
        "top_p": SELF_PROMPTS_TOP_P,
        "tokens": config.self_prompts_tokens,
        "dropped": dict(sorted(kept.dropped.items())),
    }
    return path, {"self_prompts": record}


def asking_of(config: GenerateOptions) -> GenerateOptions:
    """Options by which the prompts are written, as answers of another folder would be."""
    count = config.self_prompts or 0
    return replace(
        config,
        out=str(Path(config.out) / SELF_PROMPTS),
        temperature=(SELF_PROMPTS_TEMPERATURE,),
        top_p=SELF_PROMPTS_TOP_P,
        top_k=0,
        max_tokens=config.self_prompts_tokens,
        thinking=None,
        top_logprobs=0,
        store_taps=None,
        seed=seed_of(config.seed, -1),  # of no answer
        shard=min(config.shard, max(SMALLEST_SHARD, count // 8)),
    )


def _form_of(config: GenerateOptions, reference: Reference) -> ChatAnswers:
    """Form of a chat whose template has a turn to write in."""
    form = ChatAnswers(reference.tokenizer, reference.eos_token_ids)
    try:
        form.user_turn()
    except UserError as error:
        raise UserError(
            f"target {config.target!r} can write no prompts of its own ({error}); give --prompts, "
            "or a chat model"
        ) from error
    return form


def _written_in(part: Path) -> Iterator[list[int]]:
    table = pq.read_table(part, columns=["input_ids", "loss_mask"])
    for ids, mask in zip(*(table[name].to_pylist() for name in table.column_names), strict=True):
        yield list(itertools.compress(ids, mask))


def _check_kept(config: GenerateOptions, kept: KeptPrompts) -> None:
    if kept.seen >= PROBED and len(kept.texts) < MIN_KEPT * kept.seen:
        raise UserError(
            f"target {config.target!r} writes no useful prompts ({_told(kept)}); give --prompts, "
            "or more --self-prompts-tokens"
        )


def _told(kept: KeptPrompts) -> str:
    why = ", ".join(f"{count} {reason}" for reason, count in kept.dropped.most_common())
    return f"{len(kept.texts)} of {kept.seen} prompts kept" + (f"; dropped: {why}" if why else "")
