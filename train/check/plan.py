"""`draftsmith plan`: a training step of each draft is made here, and gives what the run will take
and which options to give."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from shlex import quote
from time import perf_counter
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.device import device_of, load_target, weight_dtype
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import markdown_table
from draftsmith.progress import Progress
from draftsmith.train.check.finding import FAIL
from draftsmith.train.check.memory import GIB, TRAINED_BYTES, check_fit, check_training, parts_of
from draftsmith.train.config import PlanConfig, TrainConfig
from draftsmith.train.data.mixture import read_mixture
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.quiet import quiet
from draftsmith.train.resolve import drafter_options, families_of, training
from draftsmith.train.trainer import Trainee

STEP_ROWS, STEP_LENGTH = 4, 256  # of the timed step, at most
STORED_PAYS = 0.3  # share of a step's time that the target takes
TIMED = 3  # passes of each kind, the first of which is not counted
PASSES = 2 * TIMED  # of a draft
Sizes = tuple[int, float]  # tokens of an epoch, and of a text
HEAD = ("draft", "trained", "tok/s", "target", "hours", "memory")


class Planned(NamedTuple):
    """One draft."""

    family: str
    parameters: int  # trained
    tokens_per_s: float
    target_share: float  # of a step's time, which stored taps save
    hours: float
    memory_bytes: int  # weights, gradients and moments; activations on top
    too_large: str  # what makes it fit beside the target; empty where it fits


def run(config: PlanConfig) -> int:
    quiet()
    plan = make_plan(config)
    print(json.dumps(plan, indent=2) if config.json else table(plan))
    return 0


def make_plan(config: PlanConfig) -> dict[str, Any]:
    families = families_of(config)
    target = open_target(config)
    sizes = sizes_of(config, target)
    drafts: list[Planned] = []
    refused: dict[str, str] = {}
    progress = Progress("plan", len(families) * PASSES, unit="passes")
    for at, family in enumerate(families):
        progress.update(at * PASSES, family)
        try:
            show = partial(progress.advance, family)
            drafts.append(planned(config, target, sizes, family, show))
        except UserError as error:
            refused[family] = str(error)
    progress.update(progress.total)
    progress.close()
    if not drafts:
        reason = next(iter(refused.values()))
        raise UserError(f"no draft can be planned for {config.target!r}: {reason}")
    return {
        "schema": 1,
        "target": config.target,
        "device": str(target.device),
        "tokens": sizes[0],
        "drafts": [draft._asdict() for draft in drafts],
        "refused": refused,
        "give": give(config, drafts),
    }


def open_target(config: PlanConfig) -> Target:
    """Raises `UserError` where it does not fit, before it is loaded."""
    device, trust, offload = device_of(), config.trust_remote_code, config.target_offload
    dtype = weight_dtype("auto", device, config.target, trust_remote_code=trust)
    fits = check_fit(config.target, device, dtype=dtype, offload=offload, trust_remote_code=trust)
    if fits is not None and fits.status == FAIL:
        raise UserError(f"the target does not fit: {fits.what}; {fits.mend}")
    return load_target(config.target, dtype=dtype, offload=offload, trust_remote_code=trust)


def sizes_of(config: PlanConfig, target: Target) -> Sizes:
    if not config.data:
        return config.answers * config.tokens, config.tokens
    length = target.max_positions
    mixture = read_mixture(config.data, target, max_length=length, held_out_share=0.0)
    return mixture.tokens_per_epoch(), float(mixture.train.lengths.mean())


def limits_of(train: TrainConfig) -> dict[str, float]:
    """Options that end the run, whichever comes first."""
    given = {"steps": train.steps, "epochs": train.epochs, "minutes": train.minutes}
    return {name: value for name, value in given.items() if value is not None} or {"epochs": 1}


def seconds_of(train: TrainConfig, sizes: Sizes, tokens_per_s: float) -> float:
    """Time until the first of these limits."""
    tokens, of_a_text = sizes
    row = train.max_length if train.packing else min(of_a_text, train.max_length)
    step_s = row * train.batch_size * train.accumulate / tokens_per_s
    each_s = {"steps": step_s, "epochs": tokens / tokens_per_s, "minutes": 60.0}
    return min(value * each_s[name] for name, value in limits_of(train).items())


def planned(
    config: PlanConfig, target: Target, sizes: Sizes, family: str, show: Callable[[], None]
) -> Planned:
    """`show` is called after each of `PASSES` passes."""
    train, offload = training(config, family), config.target_offload
    # Which tokens a reduced vocabulary holds changes no size and no time.
    counts = torch.ones(target.vocab_size)
    drafter: Any = FAMILIES[family].create(
        drafter_options(train), target, seed=0, token_counts=counts
    )
    drafter = drafter.to(device=target.device, dtype=torch.float32)
    trained = sum(one.numel() for one in drafter.parameters() if one.requires_grad)
    tokens_per_s, target_share = timed_step(train, target, drafter, show)
    fits = check_training(target, drafter, train.max_length, offload=offload)
    return Planned(
        family=family,
        parameters=trained,
        tokens_per_s=tokens_per_s,
        target_share=target_share,
        hours=seconds_of(train, sizes, tokens_per_s) / 3600,
        memory_bytes=parts_of(target.model).on_device(offload=offload) + TRAINED_BYTES * trained,
        too_large=f"training {family} is too large: {fits.what}; {fits.mend}" if fits.mend else "",
    )


def timed_step(
    config: TrainConfig, target: Target, drafter: torch.nn.Module, show: Callable[[], None]
) -> tuple[float, float]:
    """Tokens per second of a step without its optimizer, whose time does not grow with the tokens,
    and the target's share of that time."""
    source = LiveSource(target)
    trainee = Trainee(drafter, source, config.unroll)
    length = min(STEP_LENGTH, config.max_length, target.max_positions)
    shape = (min(STEP_ROWS, config.batch_size), length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, shape, generator=generator).to(target.device)
    mask = torch.ones_like(ids)
    text = TextBatch(input_ids=ids, attention_mask=mask, weights=mask.float())
    count = torch.tensor(float(ids.numel()), device=target.device)

    def read() -> torch.Tensor:
        return target.states(ids, mask, trainee.drafter.taps)[1]

    def step() -> torch.Tensor:
        loss = trainee(text, num_items_in_batch=count)["loss"]
        loss.backward()
        return loss

    read_s, step_s = seconds(read, show), seconds(step, show)
    return ids.numel() / step_s, min(1.0, read_s / step_s)


def seconds(work: Callable[[], torch.Tensor], show: Callable[[], None]) -> float:
    """The least time of two, after one that is not counted. A value is read, for which a device
    has to be done."""
    times = []
    for _ in range(TIMED):
        begun_s = perf_counter()
        work().flatten()[0].item()
        times.append(perf_counter() - begun_s)
        show()
    return min(times[1:])


def give(config: PlanConfig, drafts: list[Planned]) -> list[str]:
    """Commands of the run with the first draft, and what makes it faster or possible."""
    first, data = drafts[0], " ".join(config.data) or "DATA"
    limits = limits_of(training(config, first.family))
    epochs = limits.get("epochs", 1)
    words = [
        f"draftsmith train {first.family} {quote(config.target)} --data {data} --out DRAFT",
        *(f"--{name} {value:.15g}" for name, value in limits.items()),
        *(["--target-offload", config.target_offload] if config.target_offload else []),
        *([config.recipe] if config.recipe else []),
    ]
    lines = [" ".join(words)]
    if not config.data:
        generate = f"draftsmith generate {quote(config.target)} --prompts PROMPTS --out DATA"
        lines.insert(0, generate)
    if first.target_share > STORED_PAYS and epochs > 1:
        lines.append(
            f"the target takes {first.target_share:.0%} of a step: generate with --store-taps and "
            f"train with --teacher stored, to run it once for {epochs:g} epochs"
        )
    return [*lines, *(draft.too_large for draft in drafts if draft.too_large)]


def table(plan: dict[str, Any]) -> str:
    rows = [row_of(Planned(**draft)) for draft in plan["drafts"]]
    lines = [f"data: {plan['tokens']:,} tokens", "", *markdown_table(HEAD, rows), ""]
    lines += [f"{family} is left out: {why}" for family, why in plan["refused"].items()]
    lines.append(
        "trained: parameters; target: its share of a step; memory: of weights, gradients and "
        "moments, activations come on top"
    )
    return "\n".join([*lines, "", *plan["give"]])


def row_of(one: Planned) -> tuple[str, ...]:
    return (
        one.family,
        f"{one.parameters / 1e6:.1f} M",
        f"{one.tokens_per_s:,.0f}",
        f"{one.target_share:.0%}",
        f"{one.hours:.2f}",
        f"{one.memory_bytes / GIB:.2f} GiB",
    )
