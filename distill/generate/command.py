"""`draftsmith generate`: answers to prompts, as a dataset to train on. Resumes where it was
killed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.config_checks import check_generate
from draftsmith.distill.generate import prompts as prompt_source
from draftsmith.distill.generate.answers import LOCK, AnswerFolder, Processes, joined
from draftsmith.distill.generate.prompts import columns_of
from draftsmith.distill.generate.self_prompts import write_prompts
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


def run(config: GenerateOptions, new_answers: NewAnswers) -> int:
    check_generate(config)
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
