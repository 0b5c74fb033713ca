"""Checks of the options of `generate` and `distill`, before anything is loaded. Torch-free."""

from __future__ import annotations

import os

from draftsmith.config import check_limits
from draftsmith.distill.config import POSITIONS, DistillConfig, GenerateOptions, LearnConfig
from draftsmith.errors import UserError
from draftsmith.kernels.divergence.kind import kind_of


def check_generate(config: GenerateOptions) -> None:
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
        raise UserError("--url and --keep-answers both say where answers come from; give one")
    if config.keep_answers and (config.thinking == "both" or len(config.temperatures) > 1):
        raise UserError(
            "--thinking both and several --temperature are spread over answers to be written, and "
            "--keep-answers writes none; leave them out"
        )
    if config.url is None and (config.model, config.api_key) != (None, None):
        raise UserError("--model and --api-key are about a server; give --url too")
    if config.taps is not None and config.store_taps is None:
        raise UserError("--taps are stored in a precision; give --store-taps bf16 or fp8 too")


def check_self_prompts(config: GenerateOptions) -> None:
    if (config.self_prompts is not None) == bool(config.prompts):
        given = "both name" if config.prompts else "are left out, and one names"
        raise UserError(
            f"--prompts and --self-prompts {given} the prompts; give one of them (train --data "
            "takes several folders)"
        )
    if config.self_prompts is None:
        return
    others = {
        "--keep-answers": config.keep_answers,
        "--count": config.count is not None,
        "--chat never": config.chat == "never",
    }
    for name, is_given in others.items():
        if is_given:
            raise UserError(
                f"{name} does not go with --self-prompts {config.self_prompts}, which are so many "
                "chats to be answered; leave it out"
            )


def started() -> int:
    """Number of processes that a launcher started together, this one included."""
    return int(os.environ.get("WORLD_SIZE") or "1")


def check_processes(config: GenerateOptions) -> None:
    """Raises `UserError` for options that several processes cannot use."""
    if started() == 1:
        return
    if config.url is not None:
        raise UserError(
            f"--url is {config.url!r}, but WORLD_SIZE is {started()} and one process asks a server "
            "for as many answers at once as --batch says; start it without a launcher"
        )
    if config.device.startswith("cuda:"):
        raise UserError(
            f"device is {config.device!r}, but WORLD_SIZE is {started()} and each process takes a "
            "device of its own; leave --device out"
        )


def check_distill(config: DistillConfig) -> None:
    check_limits(config)
    if config.target_offload is not None and config.learn.teacher == "recorded":
        raise UserError(
            f"option 'target_offload' is {config.target_offload!r}, but with "
            "learn.teacher=recorded no target is loaded; leave one of them out"
        )
    check_learn(config.learn)
    learn, gate = config.learn, config.gate
    if learn.reservoir < learn.fresh:
        raise UserError(
            f"learn.reservoir is {learn.reservoir}, below learn.fresh {learn.fresh}; no update "
            "could ever begin"
        )
    if gate.window < gate.requests:
        raise UserError(
            f"gate.window is {gate.window}, below gate.requests {gate.requests}; no decision "
            "could ever be made"
        )


def check_learn(config: LearnConfig) -> None:
    check_limits(config, "learn.")
    kind_of(config.divergence)
    check_teacher(config)
    if not config.positions:
        raise UserError(f"learn.positions is empty; choose from {', '.join(POSITIONS)}")


def check_teacher(config: LearnConfig) -> None:
    """Refuses options that need more than the recorded likeliest tokens and their tail."""
    if config.teacher == "live":
        return
    if config.divergence.startswith("ce"):
        raise UserError(
            "option 'learn.divergence' needs whole distributions and records hold the likeliest "
            "tokens; change it, or give learn.teacher=live"
        )
    if set(config.positions) == {"bonus"}:
        raise UserError(
            "learn.positions is 'bonus' alone, of which records hold no distribution; add "
            "accepted or first-rejected, or give learn.teacher=live"
        )
