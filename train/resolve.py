"""Meaning of a `TrainConfig` once its parts are seen together: checks, the length of the run, and
whether a run may be continued. Pure and torch-free."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from draftsmith.config import build, check_limits, merge, read_yaml, shipped
from draftsmith.drafters.config import check_offload, check_shares
from draftsmith.drafters.options import DrafterOptions, MedusaOptions, MtpOptions, options_of
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.kernels.divergence.kind import kind_of
from draftsmith.train.config import FAMILIES, PlanConfig, TrainConfig
from draftsmith.train.data.folders import check_folders, folders_of, named

# Options that may differ between a run and its continuation: they change how long or how loudly it
# trains, not what.
CONTINUABLE = {
    "steps", "epochs", "minutes", "resume", "log_every", "save_every", "eval_every", "eval_prompts",
    "eval_tokens", "report_to",
    "target_shares", "target_offload", "target_server", "out",
    # Of as many batches an optimizer step as before: `checkpoints.py` sees to that.
    "accumulate",
}  # fmt: skip


def drafter_options(config: TrainConfig) -> DrafterOptions:
    """The options of the chosen family; one of another family is an error, not ignored."""
    options = options_of(config.family, config.draft)
    if isinstance(options, MedusaOptions) and options.num_heads > config.unroll.steps:
        raise UserError(
            f"option 'draft.num_heads' is {options.num_heads} but 'unroll.steps' is "
            f"{config.unroll.steps}, so the last heads "
            "would never be trained; make them equal"
        )
    if isinstance(options, MtpOptions) and options.modules > config.unroll.steps:
        raise UserError(
            f"option 'draft.modules' is {options.modules} but 'unroll.steps' is "
            f"{config.unroll.steps}, so the last modules would never be trained; make "
            "'unroll.steps' at least as many"
        )
    return options


def check(config: TrainConfig) -> None:
    """Raises a `UserError` for values that no run could use, or not this one's processes."""
    check_options(config)
    check_processes(config)


def check_processes(config: TrainConfig) -> None:
    if config.deepspeed is not None and "RANK" not in os.environ:
        raise UserError(
            f"option 'deepspeed' is {config.deepspeed!r} but no launcher started this process; "
            "use torchrun --nproc_per_node N -m draftsmith.cli train ..."
        )
    check_shares(config.target_shares, "train")


def check_options(config: TrainConfig) -> None:
    """Raises a `UserError` for values that no run could use."""
    drafter_options(config)
    folders_of(config.data)
    if config.init is not None:
        check_init(config.init, config)
    if config.deepspeed is not None:
        deepspeed_config(config.deepspeed)
        if config.optim.optimizer != "adamw":
            raise UserError(
                f"option 'optim.optimizer' is {config.optim.optimizer!r} but with DeepSpeed the "
                "optimizer is that of "
                f"{config.deepspeed!r}; leave one of the two out"
            )
    check_target_server(config)
    check_target_offload(config)
    check_limits(config)
    kind_of(config.divergence)


def check_target_offload(config: TrainConfig) -> None:
    if config.target_offload is None:
        return
    check_offload(config.target_offload, config.target_shares)
    if config.draft is not None and config.draft.target_layers is not None:
        raise UserError(
            f"option 'draft.target_layers' is {config.draft.target_layers} and copies layers of a "
            "target whose weights are here, not offloaded; give draft.init or draft.hidden_size, "
            "or leave target_offload out"
        )


def check_target_server(config: TrainConfig) -> None:
    """Raises a `UserError` for what likeliest tokens from an engine cannot do."""
    top, server = config.target_logprobs, config.target_server
    if not top and server is None:
        return
    given = f"option 'target_logprobs' is {top}"
    if server is None or config.teacher != "live":
        raise UserError(
            f"{given}, of a live target on target_server; give target_server too, or leave it out"
        )
    if not top:
        raise UserError(
            f"option 'target_server' is {server!r}, whose likeliest tokens are read; give "
            "target_logprobs=64 too"
        )
    if config.family != "draft-lm":
        raise UserError(
            f"option 'target_server' is {server!r} but a draft of family {config.family!r} reads "
            "states of the target, which no server gives; store them where the target is "
            "(draftsmith generate --store-taps bf16) and give teacher=stored"
        )
    check_sparse(config, given, "leave it out")
    others = {
        "target_shares": config.target_shares > 1,
        "target_offload": config.target_offload is not None,
        "draft.target_layers": bool(config.draft and config.draft.target_layers),
        "eval_prompts": bool(config.eval_prompts),
    }
    for name, needs_target in others.items():
        if needs_target:
            raise UserError(
                f"option {name!r} needs the target here and option 'target_server' is {server!r}; "
                "leave one of them out (eval_prompts=0, say)"
            )


def check_init(init: str, config: TrainConfig) -> None:
    if config.family == "draft-lm":
        raise UserError(
            f"option 'init' is {init!r} but any language model can begin a draft-lm; give it as "
            "draft.init"
        )
    if config.draft is not None:
        raise UserError(
            f"options under 'draft' are of a new draft but option 'init' is {init!r}; leave one of "
            "the two out"
        )


def check_stored_sparse(config: TrainConfig) -> None:
    """Refuses options that need whole distributions where the data stores the likeliest tokens and
    their tail."""
    mend = "store its taps too (draftsmith generate --store-taps), or use --teacher live"
    check_sparse(config, f"{named(config.data)} stores the likeliest tokens", mend)
    if config.with_prompts:
        raise UserError(
            f"option 'with_prompts' is given and {named(config.data)} stores distributions of "
            f"answers alone; {mend}"
        )


def check_sparse(config: TrainConfig, why: str, mend: str) -> None:
    """Refuses a divergence that needs more than the likeliest tokens and their tail."""
    if config.divergence.startswith("ce"):
        raise UserError(f"option 'divergence' needs whole distributions and {why}; {mend}")


def check_plan(config: PlanConfig) -> None:
    """Raises `UserError` where no family can be planned."""
    check_folders(config.data)
    refused = []
    for family in families_of(config):
        try:
            training(config, family)
        except UserError as error:
            refused.append(error)
        else:
            return
    raise refused[0]


def families_of(config: PlanConfig) -> tuple[str, ...]:
    if config.families or config.recipe is None:
        return config.families or FAMILIES
    family = recipe_of(config).get("family")
    if family is None:
        raise UserError(f"recipe {config.recipe!r} names no family; give one of --families")
    return (family,)


def training(config: PlanConfig, family: str) -> TrainConfig:
    """Options of the run that is planned: those of the recipe."""
    own = {
        "family": family,
        "target": config.target,
        "target_offload": config.target_offload,
        "data": config.data or ("DATA",),
        "out": "DRAFT",
        **({} if config.epochs is None else {"epochs": config.epochs}),
    }
    train = build(TrainConfig, merge(recipe_of(config), own))
    check_options(train)
    return train


def recipe_of(config: PlanConfig) -> dict[str, Any]:
    return {} if config.recipe is None else read_yaml(config.recipe)


def total_steps(config: TrainConfig, batches_per_epoch: int, world_size: int) -> int:
    """Optimizer steps until steps or epochs run out; a run bounded by minutes alone gets a bound it
    will not reach."""
    per_epoch = batches_per_epoch / (config.accumulate * world_size)
    bounds = []
    if config.steps is not None:
        bounds.append(config.steps)
    if config.epochs is not None:
        bounds.append(max(1, round(config.epochs * per_epoch)))
    if not bounds:
        bounds.append(10_000_000 if config.minutes is not None else max(1, round(per_epoch)))
    return min(bounds)


def save_interval(config: TrainConfig) -> int:
    """A multiple of `log_every`, so that a resumed run logs over the same windows as an
    uninterrupted one."""
    return -(-config.save_every // config.log_every) * config.log_every


def eval_interval(config: TrainConfig, steps: int) -> int:
    """Steps between two evaluations of a run of `steps`, 0 for one at the end only: few, so that
    they cost little beside the training."""
    if config.eval_every is not None:
        return config.eval_every
    # An offloaded target is read again for every pass.
    is_rare = config.minutes is not None or config.target_offload is not None
    return 0 if is_rare else max(200, -(-steps // 5))


def different_from(config: TrainConfig, recorded: dict[str, Any]) -> str | None:
    """The first option, with its old and new value, that makes a continuation another run; None
    when there is none."""
    now, then = flat(asdict(config)), flat(recorded)
    for name in sorted((now.keys() | then.keys()) - CONTINUABLE):
        if now.get(name) != then.get(name):
            return f"{name}: {then.get(name)!r} -> {now.get(name)!r}"
    return None


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": (1,)}} -> {"a.b": [1]}, with lists for tuples as JSON gives them back."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
    return found


def deepspeed_config(path: str | None) -> dict | None:
    """The JSON at `path`; read here so that a wrong path is one sentence."""
    if path is None:
        return None
    config = read_json(shipped(path), "DeepSpeed config")
    if "zero_optimization" not in config:
        raise UserError(
            f"DeepSpeed config {path!r} has no 'zero_optimization' section; start from "
            "recipes/zero1.json"
        )
    return config


def zero_stage(path: str | None) -> int:
    """0 without DeepSpeed."""
    config = deepspeed_config(path)
    return 0 if config is None else config["zero_optimization"].get("stage", 0)
