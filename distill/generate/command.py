"""`draftsmith generate`: answers to prompts, as a dataset to train on. Resumes where it was
killed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from draftsmith.config import check_limits
from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate import prompts as prompt_source
from draftsmith.distill.generate.answers import (
    LOCK,
    AnswerFolder,
    Processes,
    check_processes,
    joined,
)
from draftsmith.distill.generate.prompts import columns_of, temperatures
from draftsmith.distill.generate.self_prompts import check_self_prompts, write_prompts
from draftsmith.distill.generate.steps import (
    NewAnswers,
    answer_all,
    check_room,
    describe,
    layout_of,
    new_writer,
    open_reference,
    store_taps,
)
from draftsmith.errors import UserError
from draftsmith.lock import folder_lock
from draftsmith.prompts.sources import check_source


def run(config: GenerateOptions, new_answers: NewAnswers) -> int:
    check(config)
    check_source(config.prompts)  # before a model is loaded
    # The first of several processes holds the folder for all.
    with joined() as processes, folder_lock(config.out, LOCK) if processes.leads else nullcontext():
        return _run(config, new_answers, processes)


def _run(config: GenerateOptions, new_answers: NewAnswers, processes: Processes) -> int:
    reference = open_reference(config)
    given = config
    asked_by: dict[str, Any] = {}
    if config.self_prompts is not None:
        path, asked_by = write_prompts(config, reference, new_answers, processes)
        given = replace(config, prompts=str(path))
    found = prompt_source.load(given, reference.tokenizer, eos_token_ids=reference.eos_token_ids)
    room = 0 if config.keep_answers else config.max_tokens
    prompts = [prompt for prompt in found if len(prompt.ids) + room <= reference.max_positions]
    if not prompts:
        raise UserError(
            f"every prompt of {given.prompts!r} with --max-tokens {config.max_tokens} passes the "
            "target's context of "
            f"{reference.max_positions} tokens; give shorter ones"
        )
    layout = None
    if config.store_taps is not None:
        layout = layout_of(config, reference.loaded())
        check_room(config.out, layout, sum(len(prompt.ids) + room for prompt in prompts))
    longest = max(len(prompt.ids) for prompt in prompts) + room
    writer = new_writer(config, reference, new_answers, longest)
    folder = processes.leader_first(
        lambda: AnswerFolder(
            config.out,
            total=len(prompts),
            size=config.shard,
            has_distributions=config.top_logprobs > 0,
            columns=columns_of(config),
            provenance={
                **describe(config, reference, prompts),
                **asked_by,
                **writer.provenance,
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
    if written := writer.report():
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


def check(config: GenerateOptions) -> None:
    check_limits(config)
    check_self_prompts(config)
    check_processes(config)
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
