"""`draftsmith generate`: the target answers prompts; a dataset to train on. Resumes where it was killed."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from importlib import metadata
from typing import Any

import torch

from draftsmith.config import to_dict
from draftsmith.distill import prompts as prompt_source
from draftsmith.distill.answers import AnswerFolder
from draftsmith.distill.config import GenerateConfig
from draftsmith.distill.place import load_target
from draftsmith.distill.prompts import Prompt
from draftsmith.drafters.target import Target
from draftsmith.drafters.vocabulary import template_hash, tokenizer_hash
from draftsmith.errors import UserError
from draftsmith.kernels.laws import top_law
from draftsmith.progress import Progress
from draftsmith.version import __version__

# Rows of full-vocabulary logits held at once while laws are stored.
LAW_CHUNK = 512


def run(config: GenerateConfig) -> int:
    _check(config)
    target = load_target(config.target, dtype=config.dtype, device=config.device)
    found = prompt_source.load(config, target.tokenizer())
    prompts = [prompt for prompt in found if len(prompt.ids) + config.max_tokens <= target.max_positions]
    if not prompts:
        raise UserError(
            f"every prompt of {config.prompts!r} with --max-tokens {config.max_tokens} passes the target's context of "
            f"{target.max_positions} tokens; give shorter ones"
        )
    folder = AnswerFolder(
        config.out,
        total=len(prompts),
        size=config.shard,
        has_laws=config.top_logprobs > 0,
        provenance={**describe(config, target, prompts), "left_out": len(found) - len(prompts)},
    )
    answer_all(config, target, prompts, folder)
    summary = folder.close()
    print(f"{summary['answers']} answers, {summary['tokens']} tokens in {config.out}")
    if len(found) > len(prompts):
        print(f"{len(found) - len(prompts)} prompts were too long for the target's context and are left out", file=sys.stderr)
    return 0


def answer_all(config: GenerateConfig, target: Target, prompts: list[Prompt], folder: AnswerFolder) -> None:
    done = sum(len(folder.done(shard)) for shard in range(folder.num_shards))
    progress = Progress("generate", len(prompts), unit="answers", start=done)
    begun_s, tokens = time.monotonic(), 0
    for shard in range(folder.num_shards):
        for batch in batches_left(folder, shard, prompts, config.batch):
            rows = answer_batch(config, target, prompts, batch)
            folder.add(shard, rows)
            done += len(rows)
            tokens += sum(sum(row["loss_mask"]) for row in rows)
            progress.update(done, f"{tokens / (time.monotonic() - begun_s):.0f} tok/s")
        folder.finish(shard)
    progress.close()


def batches_left(folder: AnswerFolder, shard: int, prompts: list[Prompt], size: int) -> list[list[int]]:
    """Prompt indices of the batches that are not on disk, prompts of like length together."""
    order = sorted(folder.prompts_of(shard), key=lambda index: len(prompts[index].ids))
    batches = [order[begin : begin + size] for begin in range(0, len(order), size)]
    done = folder.done(shard)
    left = [[index for index in batch if index not in done] for batch in batches]
    return [batch for batch in left if batch]


def answer_batch(config: GenerateConfig, target: Target, prompts: list[Prompt], batch: list[int]) -> list[dict[str, Any]]:
    answers = target.answer(
        [prompts[index].ids for index in batch],
        max_new_tokens=config.max_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seeds=[seed_of(config.seed, index) for index in batch],
        batch_size=len(batch),
    )
    rows = []
    for index, answer in zip(batch, answers, strict=True):
        prompt = prompts[index]
        row = {
            "index": index,
            "name": prompt.name,
            "split": "held-out" if prompt.held_out else "train",
            "input_ids": [*prompt.ids, *answer],
            "loss_mask": [0] * len(prompt.ids) + [1] * len(answer),
        }
        rows.append(row | laws(target, row["input_ids"], len(prompt.ids), config.top_logprobs))
    return rows


def seed_of(seed: int, index: int) -> int:
    """Each prompt has its own random stream, so that its answer does not depend on where a run was interrupted."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "big") >> 1


def laws(target: Target, input_ids: list[int], prompt_length: int, top: int) -> dict[str, Any]:
    """The target's unfiltered law at temperature 1 at every answer token; {} when none is wanted."""
    if not top:
        return {}
    ids = torch.tensor([input_ids], device=target.device)
    _, hidden = target.states(ids, torch.ones_like(ids), ())
    rows = hidden[0, prompt_length - 1 : -1]
    found = [top_law(target.head(chunk).float(), top) for chunk in rows.split(LAW_CHUNK)]
    return {
        "top_ids": [row for law in found for row in law.ids.tolist()],
        "top_logprobs": [row for law in found for row in law.logprobs.tolist()],
        "tail": [row for law in found for row in law.tail.tolist()],
    }


def describe(config: GenerateConfig, target: Target, prompts: list[Prompt]) -> dict[str, Any]:
    """Everything that an answer depends on."""
    tokenizer = target.tokenizer()
    return {
        "target": config.target,
        "target_revision": target.revision,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer.chat_template),
        "prompts": config.prompts,
        "prompts_hash": _digest([prompt.ids for prompt in prompts]),
        "count": len(prompts),
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "max_tokens": config.max_tokens,
        "seed": config.seed,
        "top_logprobs": config.top_logprobs,
        "shard": config.shard,
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")} | {"draftsmith": __version__},
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _check(config: GenerateConfig) -> None:
    least_values = {"max_tokens": 1, "prompt_tokens": 1, "batch": 1, "shard": 1, "top_logprobs": 0, "top_k": 0}
    values = to_dict(config)
    for name, least in least_values.items():
        if values[name] < least:
            raise UserError(f"--{name.replace('_', '-')} is {values[name]}; it must be at least {least}")
    if config.temperature < 0 or not 0 < config.top_p <= 1:
        law = f"temperature {config.temperature} with top_p {config.top_p}"
        raise UserError(f"{law} is no sampling law; give temperature >= 0 and 0 < top_p <= 1")
