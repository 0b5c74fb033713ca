"""Table of the commands, and their start. Torch-free: modules are named here and imported when a
command runs."""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

from draftsmith.errors import UserError, check_extra, extra_of, missing
from draftsmith.progress import loading, say_busy


class Command(NamedTuple):
    config: str
    run: str
    summary: str
    extra: str | None = None  # whose packages the command cannot begin without
    # of its options alone, torch-free, before anything is read: a pipeline makes it of all stages
    check: str | None = None
    alone: bool = False  # refused where a launcher has started several processes
    saves: bool = False  # started again, it goes on from what it saved
    loads: bool = False  # imports torch and transformers, which takes seconds, before it says more
    nice: int = 0  # what its process gives way by to others on the same cores


COMMANDS = {
    "generate": Command(
        "draftsmith.commands.generate:GenerateConfig",
        "draftsmith.commands.generate:run",
        "let the target answer prompts; a dataset to train on",
        "train",
        "draftsmith.commands.generate:check",
        saves=True,
        loads=True,
    ),
    "train": Command(
        "draftsmith.train.config:TrainConfig",
        "draftsmith.train.command:run",
        "train a drafter of any family by distillation",
        "train",
        "draftsmith.train.resolve:check_options",
        saves=True,
    ),
    "eval": Command(
        "draftsmith.train.config:EvalConfig",
        "draftsmith.train.evaluate.start:run",
        "alpha_i and tau of a draft, with confidence intervals",
        "train",
        "draftsmith.train.evaluate.start:check_options",
        alone=True,
    ),
    "serve": Command(
        "draftsmith.serve.config:ServeConfig",
        "draftsmith.commands.serve:run",
        "an OpenAI-compatible server with lossless speculation",
        "serve",
        loads=True,
    ),
    "distill": Command(
        "draftsmith.distill.config:DistillConfig",
        "draftsmith.distill.command:run",
        "the online daemon: learn from served traffic, publish gated versions",
        "train",
        "draftsmith.distill.config_checks:check_distill",
        alone=True,
        saves=True,
        loads=True,
        nice=10,
    ),
    "observe": Command(
        "draftsmith.fleet.config:ObserveConfig",
        "draftsmith.fleet.observe.command:run",
        "a proxy that records the traffic of another server, to learn from",
        "serve",
        loads=True,
    ),
    "forget": Command(
        "draftsmith.distill.config:ForgetConfig",
        "draftsmith.distill.buffer.folder:run",
        "take an answer's records out of a buffer, and out of what learners keep",
    ),
    "export": Command(
        "draftsmith.train.config:ExportConfig",
        "draftsmith.train.export.start:run",
        "write a draft in the layout vLLM, SGLang or transformers load",
        check="draftsmith.train.export.start:check_options",
    ),
    "bench": Command(
        "draftsmith.serve.bench.config:BenchConfig",
        "draftsmith.serve.bench.command:run",
        "tok/s, TTFT, TPOT and tau, speculation off against on",
        "serve",
        "draftsmith.serve.bench.command:check",
    ),
    "audit": Command(
        "draftsmith.serve.audit.config:AuditConfig",
        "draftsmith.commands.audit:run",
        "is it lossless? statistics with negative controls",
        "serve",
        loads=True,
    ),
    "doctor": Command(
        "draftsmith.train.config:DoctorConfig",
        "draftsmith.train.check.doctor:run",
        "what would go wrong with this target, draft and data",
        alone=True,
    ),
    "plan": Command(
        "draftsmith.train.config:PlanConfig",
        "draftsmith.train.check.plan:run",
        "what training a draft takes here: tokens/s, hours, memory, and what to give",
        check="draftsmith.train.resolve:check_plan",
        alone=True,
        loads=True,
    ),
    "run": Command(
        "draftsmith.train.config:RunConfig",
        "draftsmith.commands.run:run",
        "a pipeline of these commands from one recipe, resumed, with a report",
        alone=True,
    ),
    "fleet": Command(
        "draftsmith.fleet.config:FleetConfig",
        "draftsmith.fleet.command:run",
        "many engines with one draft: status, promote, rollback, publish",
        "fleet",
    ),
    "chat": Command(
        "draftsmith.commands.chat:ChatConfig",
        "draftsmith.commands.chat:run",
        "talk to any OpenAI server in the terminal, with tok/s and tau of each answer",
        "serve",
    ),
    "config": Command(
        "draftsmith.commands.recipe:RecipeConfig",
        "draftsmith.commands.recipe:run",
        "print every option of a command with its default, as a recipe",
    ),
    "completion": Command(
        "draftsmith.commands.completion:CompletionConfig",
        "draftsmith.commands.completion:run",
        "print a script that completes commands, flags and values in a shell",
    ),
    "collect-env": Command(
        "draftsmith.commands.collect_env:CollectEnvConfig",
        "draftsmith.commands.collect_env:run",
        "print what a bug report needs: versions, processor, memory, devices",
    ),
}


def load(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def start(name: str, config: Any, **more: Any) -> int:
    """Exit status of a command, run with its options; `more` is what its function takes beside
    them. Raises `UserError`, for a missing package too."""
    processes = os.environ.get("WORLD_SIZE") or "1"
    if COMMANDS[name].alone and processes != "1":
        raise UserError(
            f"WORLD_SIZE is {processes}, but {name} is one process; start it without a launcher"
        )
    check_extra(name, COMMANDS[name].extra)
    if check := COMMANDS[name].check:
        load(check)(config)
    if COMMANDS[name].loads:
        load("draftsmith.drafters.layouts.hub:check_named")(config)
    if (COMMANDS[name].saves or name == "plan") and not hasattr(config, "threads"):
        say_busy()  # what takes long, and what foretells how long
    try:
        with loading(COMMANDS[name].loads):
            run = load(COMMANDS[name].run)
        return int(run(config, **more) or 0)
    except ModuleNotFoundError as error:
        extra = extra_of(error.name)
        if extra is None:
            raise
        raise missing(name, str(error.name).split(".")[0], extra) from error
