"""Steps of `draftsmith generate`: the model that answers are made for, their writer, the answers of
some shards, and what the dataset records of them."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.chat_answers import ChatAnswers
from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate.answers import AnswerFolder, Arrivals
from draftsmith.distill.generate.prompts import Prompt, recorded
from draftsmith.distill.generate.writers import (
    AnswerWriter,
    GivenWriter,
    ServerWriter,
    WrittenAnswer,
    seed_of,
)
from draftsmith.drafters.options import default_taps
from draftsmith.drafters.target.causal_lm import NO_POSITIONS
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters.target.load import load_config, load_end_ids, load_tokenizer
from draftsmith.drafters.target.taps import check_taps
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import template_hash, tokenizer_record
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.top_tokens import top_probs
from draftsmith.progress import Progress
from draftsmith.train.data.stored_taps import StatesOf, TapLayout, tap_file, writing
from draftsmith.version import __version__

# Rows of full-vocabulary logits held at once while distributions are stored.
DISTRIBUTION_CHUNK = 512


class Reference(NamedTuple):
    """Model that answers are made for. `target` is loaded where it answers, or gives
    distributions."""

    tokenizer: PreTrainedTokenizerBase
    max_positions: int
    eos_token_ids: tuple[int, ...]
    revision: str | None  # None: unknown for a server
    target: Target | None

    def loaded(self) -> Target:
        if self.target is None:
            raise ValueError("the target is not loaded where a server answers")
        return self.target


# (target, tokens of the longest prompt and its answer, options) -> writer of its answers
NewAnswers = Callable[[Target, int, Any], AnswerWriter]


def open_reference(config: GenerateOptions) -> Reference:
    if config.url is None or config.top_logprobs or config.store_taps:
        target = load_target(
            config.target,
            dtype=config.dtype,
            device=config.device,
            offload=config.target_offload,
            trust_remote_code=config.trust_remote_code,
        )
        # A server may run other weights.
        revision = target.revision if config.url is None else None
        return Reference(
            target.tokenizer(), target.max_positions, target.eos_token_ids, revision, target
        )
    trust = config.trust_remote_code
    settings = load_config(config.target, trust_remote_code=trust).get_text_config()
    limit = getattr(settings, "max_position_embeddings", NO_POSITIONS)
    tokenizer = load_tokenizer(config.target, trust_remote_code=trust)
    ends = load_end_ids(config.target, trust_remote_code=trust)
    return Reference(tokenizer, limit, ends, None, None)


def new_writer(
    config: GenerateOptions, reference: Reference, new_answers: NewAnswers, longest: int
) -> AnswerWriter:
    if config.keep_answers:
        return GivenWriter()
    if config.url is not None:
        return ServerWriter(config, ChatAnswers(reference.tokenizer, reference.eos_token_ids))
    return new_answers(reference.loaded(), longest, config)


def answer_all(
    config: GenerateOptions,
    writer: AnswerWriter,
    target: Target | None,
    prompts: list[Prompt],
    folder: AnswerFolder,
    shards: Sequence[int],
    *,
    unit: str = "answers",
) -> None:
    """Answers to the prompts of some shards that have none."""
    arrivals = Arrivals(folder, config.batch, shards)
    left = arrivals.unanswered()
    total = sum(len(folder.prompts_of(shard)) for shard in shards)
    done = total - len(left)
    progress = Progress("generate", total, unit=unit, start=done)
    begun_s, tokens = time.monotonic(), 0
    seeds = [seed_of(config.seed, index) for index in left]
    with closing(writer.write([prompts[index] for index in left], seeds)) as texts:
        try:
            for number, written in texts:
                index = left[number]
                arrivals.add(row_of(config, target, index, prompts[index], written))
                done += 1
                tokens += sum(written.mask)
                progress.update(done, f"{tokens / (time.monotonic() - begun_s):.0f} tok/s")
        finally:
            arrivals.write()  # after an interrupt too
    progress.close()


def row_of(
    config: GenerateOptions,
    target: Target | None,
    index: int,
    prompt: Prompt,
    written: WrittenAnswer,
) -> dict[str, Any]:
    row = {
        "index": index,
        "name": prompt.name,
        "split": "held-out" if prompt.held_out else "train",
        "input_ids": written.ids,
        "loss_mask": written.mask,
        **recorded(config, prompt.way),
    }
    if target is None:
        return row
    return row | distributions(target, written.ids, written.mask, config.top_logprobs)


def distributions(
    target: Target, input_ids: list[int], loss_mask: list[int], top: int
) -> dict[str, Any]:
    """Unfiltered distribution of the target at temperature 1 at every answer token; {} when `top`
    is 0."""
    if not top:
        return {}
    ids = torch.tensor([input_ids], device=target.device)
    _, hidden = target.states(ids, torch.ones_like(ids), ())
    rows = hidden[0, torch.tensor(loss_mask, device=target.device).nonzero()[:, 0] - 1]
    found = [top_probs(target.head(chunk).float(), top) for chunk in rows.split(DISTRIBUTION_CHUNK)]
    return {
        "top_ids": [row for distribution in found for row in distribution.ids.tolist()],
        "top_logprobs": [row for distribution in found for row in distribution.logprobs.tolist()],
        "tail": [row for distribution in found for row in distribution.tail.tolist()],
    }


def describe(
    config: GenerateOptions, reference: Reference, prompts: list[Prompt]
) -> dict[str, Any]:
    """Provenance: everything that an answer depends on."""
    tokenizer = reference.tokenizer
    return {
        "target": config.target,
        "target_revision": reference.revision,
        **tokenizer_record(tokenizer),
        "template_hash": template_hash(tokenizer.chat_template),
        "prompts": config.prompts or "self-prompts",
        "prompts_hash": _digest([prompt.ids for prompt in prompts]),
        "count": len(prompts),
        "temperature": single(config.temperatures),
        "thinking": config.thinking,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "max_tokens": config.max_tokens,
        "seed": config.seed,
        "top_logprobs": config.top_logprobs,
        "shard": config.shard,
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")}
        | {"draftsmith": __version__},
    }


def single(values: Sequence[float]) -> float | list[float]:
    """The one of them, or all as JSON gives them back."""
    return values[0] if len(values) == 1 else list(values)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# Of a pass, at most. glibc maps tensors above 32 MiB anew each time, which costs page faults.
PASS_TOKENS = 4096


def layout_of(config: GenerateOptions, target: Target) -> TapLayout:
    taps = config.taps or default_taps(target.num_layers)
    if min(taps) < 0 or len(set(taps)) < len(taps):
        raise UserError(
            f"--taps are {' '.join(map(str, taps))}; give raw layer ids from 0 on, each once"
        )
    check_taps(taps, target.num_layers)
    return TapLayout(taps, target.hidden_size, config.store_taps or "bf16")


def check_room(folder: str | Path, layout: TapLayout, tokens: int) -> None:
    """Prints the most that storing will take, and raises a `UserError` where the disk has less."""
    size = tokens * layout.bytes_a_token
    print(
        f"taps {', '.join(map(str, layout.taps))} and final states in {layout.precision} take at "
        f"most {size / 1e9:.2f} GB for {tokens} tokens"
    )
    stored = sum(path.stat().st_size for path in Path(folder).glob("taps-*.safetensors"))
    free = shutil.disk_usage(_existing(Path(folder))).free + stored
    if size > free:
        raise UserError(
            f"stored taps take up to {size / 1e9:.2f} GB and the disk of {str(folder)!r} "
            f"has {free / 1e9:.2f} GB free; use "
            "--store-taps fp8, fewer --taps, a smaller --count or --max-tokens, or another disk"
        )


def store_taps(
    config: GenerateOptions,
    target: Target,
    layout: TapLayout,
    folder: AnswerFolder,
    shards: Sequence[int],
) -> None:
    """States of the answers of some shards."""
    total = sum(len(folder.prompts_of(shard)) for shard in shards)
    progress = Progress("store taps", total, unit="texts")
    done = 0
    for shard in shards:
        part = folder.part(shard)
        if not _is_stored(part, layout, target):
            with folder.writing():
                _store_shard(part, layout, target, config.batch)
        done += len(folder.prompts_of(shard))
        progress.update(done)
    progress.close()


@torch.no_grad()
def _store_shard(part: Path, layout: TapLayout, target: Target, batch: int) -> None:
    texts = [
        torch.tensor(ids)
        for ids in pq.read_table(part, columns=["input_ids"])["input_ids"].to_pylist()
    ]
    lengths = [len(text) for text in texts]
    with writing(part, layout, lengths, revision=target.revision) as writer:
        for rows in passes(lengths, batch):
            ids = torch.nn.utils.rnn.pad_sequence(
                [texts[row] for row in rows], batch_first=True
            ).to(target.device)
            mask = (
                torch.arange(ids.shape[1]) < torch.tensor([lengths[row] for row in rows])[:, None]
            )
            taps, final = target.states(ids, mask.long().to(target.device), layout.taps)
            for at, row in enumerate(rows):
                writer.put(row, taps[at, : lengths[row]], final[at, : lengths[row]])


def passes(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Numbers of the texts, shortest first: at most `most` texts and, padded to the longest,
    `PASS_TOKENS` tokens at once; a longer text alone."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and (len(rows) == most or (len(rows) + 1) * lengths[row] > PASS_TOKENS):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def _is_stored(part: Path, layout: TapLayout, target: Target) -> bool:
    path = tap_file(part)
    if not path.is_file():
        return False
    found = StatesOf(path)
    if not found.is_of(part, revision=target.revision) or (found.taps, found.precision) != (
        layout.taps,
        layout.precision,
    ):
        raise UserError(
            f"stored taps {str(path)!r} are {found.taps} in {found.precision}, of this target or "
            "another; delete them to store "
            f"{layout.taps} in {layout.precision}"
        )
    return True


def _existing(folder: Path) -> Path:
    """Folder, or the nearest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
