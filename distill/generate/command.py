"""`draftsmith generate`: answers to prompts, as a dataset to train on. Resumes where it was
killed."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from importlib import metadata
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.chats.answers import ChatAnswers
from draftsmith.config import check_limits
from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate import prompts as prompt_source
from draftsmith.distill.generate.answers import LOCK, AnswerFolder, Arrivals
from draftsmith.distill.generate.processes import Processes, check_processes, joined
from draftsmith.distill.generate.prompts import Prompt
from draftsmith.distill.generate.stored_states import check_cost, layout_of, store_taps
from draftsmith.distill.generate.ways import columns_of, recorded, temperatures
from draftsmith.distill.generate.writers import (
    Answers,
    GivenWriter,
    ServerWriter,
    TargetWriter,
    Writer,
    Written,
    seed_of,
)
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters.target.load import load_config, load_end_ids, load_tokenizer
from draftsmith.drafters.target.sharded import check_offload
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import template_hash, tokenizer_record
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.top_tokens import top_probs
from draftsmith.lock import folder_lock
from draftsmith.progress import Progress
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


# (target, tokens of the longest prompt and its answer) -> its answers
NewAnswers = Callable[[Target, int], Answers]


def run(config: GenerateOptions, new_answers: NewAnswers) -> int:
    check(config)
    with joined() as processes, _alone(config, processes):
        return _run(config, new_answers, processes)


def _alone(config: GenerateOptions, processes: Processes) -> AbstractContextManager[object]:
    """Holds the folder, for all processes of a launcher."""
    return folder_lock(config.out, LOCK) if processes.leads else nullcontext()


def _run(config: GenerateOptions, new_answers: NewAnswers, processes: Processes) -> int:
    reference = open_reference(config)
    found = prompt_source.load(config, reference.tokenizer, eos_token_ids=reference.eos_token_ids)
    room = 0 if config.keep_answers else config.max_tokens
    prompts = [prompt for prompt in found if len(prompt.ids) + room <= reference.max_positions]
    if not prompts:
        raise UserError(
            f"every prompt of {config.prompts!r} with --max-tokens {config.max_tokens} passes the "
            "target's context of "
            f"{reference.max_positions} tokens; give shorter ones"
        )
    layout = None
    if config.store_taps is not None:
        layout = layout_of(config, reference.loaded())
        check_cost(config.out, reference.loaded(), layout, most_tokens(config, prompts))
    longest = max(len(prompt.ids) for prompt in prompts) + room
    writer, origin = new_writer(config, reference, new_answers, longest)
    folder = processes.leader_first(
        lambda: AnswerFolder(
            config.out,
            total=len(prompts),
            size=config.shard,
            has_distributions=config.top_logprobs > 0,
            columns=columns_of(config),
            provenance={
                **describe(config, reference, prompts),
                **origin,
                "left_out": len(found) - len(prompts),
            },
        )
    )
    shards = processes.shards(folder)
    answer_all(config, writer, reference.target, prompts, folder, shards)
    processes.wait()
    if processes.leads:
        summary = folder.close()
        print(f"{summary['answers']} answers, {summary['tokens']} tokens in {config.out}")
    if isinstance(writer, TargetWriter) and (written := writer.answers.report()):
        print(written)
    if layout is not None:
        store_taps(config, reference.loaded(), layout, folder, shards)
    if len(found) > len(prompts):
        print(
            f"{len(found) - len(prompts)} prompts were too long for the target's context and are "
            "left out",
            file=sys.stderr,
        )
    return 0


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
    limit = (
        load_config(config.target, trust_remote_code=trust)
        .get_text_config()
        .max_position_embeddings
    )
    tokenizer = load_tokenizer(config.target, trust_remote_code=trust)
    ends = load_end_ids(config.target, trust_remote_code=trust)
    return Reference(tokenizer, limit, ends, None, None)


def new_writer(
    config: GenerateOptions, reference: Reference, new_answers: NewAnswers, longest: int
) -> tuple[Writer, dict[str, Any]]:
    """Writer of the answers, and its entries in the provenance beyond those of the target's own
    answers."""
    if config.keep_answers:
        # They follow no known distribution.
        return GivenWriter(), {
            "answered_by": "the prompts",
            "temperature": None,
            "top_k": None,
            "top_p": None,
            "max_tokens": None,
        }
    if config.url is not None:
        writer = ServerWriter(config, ChatAnswers(reference.tokenizer, reference.eos_token_ids))
        return writer, {"answered_by": f"server of {writer.model}"}
    answers = new_answers(reference.loaded(), longest)
    return TargetWriter(answers, config), answers.provenance


def most_tokens(config: GenerateOptions, prompts: list[Prompt]) -> int:
    """Upper bound of the tokens of the texts to come, whose answers may end early."""
    return sum(
        len(prompt.ids) + (0 if config.keep_answers else config.max_tokens) for prompt in prompts
    )


def answer_all(
    config: GenerateOptions,
    writer: Writer,
    target: Target | None,
    prompts: list[Prompt],
    folder: AnswerFolder,
    shards: Sequence[int],
) -> None:
    """Answers to the prompts of some shards that have none."""
    arrivals = Arrivals(folder, config.batch, shards)
    left = arrivals.unanswered()
    total = sum(len(folder.prompts_of(shard)) for shard in shards)
    done = total - len(left)
    progress = Progress("generate", total, unit="answers", start=done)
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
    config: GenerateOptions, target: Target | None, index: int, prompt: Prompt, written: Written
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
        "prompts": config.prompts,
        "prompts_hash": _digest([prompt.ids for prompt in prompts]),
        "count": len(prompts),
        "temperature": single(temperatures(config)),
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


def check(config: GenerateOptions) -> None:
    check_limits(config)
    check_processes(config)
    check_offload(config.target_offload, dtype=config.dtype)
    if config.target_offload is not None and config.url is None and not config.keep_answers:
        raise UserError(
            f"--target-offload is {config.target_offload!r}, with which the whole target would be "
            "read again for every token of an answer; give --keep-answers or --url too, or leave "
            "it out"
        )
    if config.url is not None and config.keep_answers:
        raise UserError(
            "--url and --keep-answers both say where answers come from; give one of them"
        )
    if config.keep_answers and (config.thinking == "both" or len(temperatures(config)) > 1):
        raise UserError(
            "--thinking both and several --temperature are spread over answers to be written, and "
            "--keep-answers writes none; leave them out"
        )
    if config.url is None and (config.model, config.api_key) != (None, None):
        raise UserError("--model and --api-key are about a server; give --url too")
    if config.taps is not None and config.store_taps is None:
        raise UserError("--taps are stored in a precision; give --store-taps bf16 or fp8 too")
