"""The plan as JSON and as text."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.target.ranks import started
from draftsmith.drafters.target.target import Target
from draftsmith.train.doctor.memory import available_bytes, num_bytes, parts_of, ways_to_fit
from draftsmith.train.plan.candidates import Planned
from draftsmith.train.plan.config import PlanConfig
from draftsmith.train.plan.costs import TRAINED_BYTES, Data
from draftsmith.train.plan.forecast import Forecast
from draftsmith.train.plan.offloaded import Offloaded, offloaded_table
from draftsmith.train.plan.text import aligned, gib, interval

SCHEMA = 1
BUSY = 0.5  # others' share of the cores above which times are not to be trusted
HEAD = (
    "draft",
    "taps",
    "trained",
    "k",
    "tau",
    "needs",
    "speed-up",
    "train h",
    "memory",
    "run on disk",
    "taps on disk",
)


class Plan(NamedTuple):
    config: PlanConfig
    load: float  # the machine's load average before anything was timed
    target: Target
    data: Data
    planned: list[Planned]
    refused: dict[str, str]  # why a candidate was left out, by its name
    offloaded: Offloaded | None = None  # of an offloaded target


def report(plan: Plan) -> dict[str, Any]:
    config, load, target, data, planned, refused, offloaded = plan
    return {
        "schema": SCHEMA,
        "target": {
            "name": config.target,
            "bytes": num_bytes(target.model),
            "vocab_size": target.vocab_size,
        },
        "device": torch.cuda.get_device_name(target.device)
        if target.device.type == "cuda"
        else "cpu",
        "threads": torch.get_num_threads(),
        "load_before": round(load, 2),
        "context": config.context,
        "target_shares": config.target_shares,
        "target_offload": config.target_offload,
        "offloaded": None if offloaded is None else offloaded._asdict(),
        "too_large": too_large(plan),
        "processes": started(),
        "data": data._asdict(),
        "drafts": [of_candidate(one) for one in planned],
        "refused": refused,
        "recommended": {
            str(streams): None
            if (best := recommended(planned, streams)) is None
            else best.candidate.name
            for streams in sorted(set(config.streams))
        },
    }


def of_candidate(planned: Planned) -> dict[str, Any]:
    expectation = planned.expectation
    return {
        "family": planned.candidate.family,
        "draft": planned.candidate.draft or None,
        "options": planned.candidate.overrides,
        "taps": list(planned.taps),
        "coverage": planned.candidate.coverage,
        "cost": planned.cost._asdict() | {"serve_memory_bytes": planned.serve_memory_bytes},
        "expected_from": None if expectation is None else expectation.source,
        "streams": {
            str(streams): {
                "pass_ms": times.pass_ms,
                "verify_ms": times.verify_ms,
                "draft_ms": times.draft_ms,
                "round_cost": {k: cost._asdict() for k, cost in times.cost.items()},
                "forecasts": [of_forecast(one) for one in planned.forecasts(streams)],
                "trees": [
                    {
                        "tree": one.tree,
                        "tokens_per_s": one.tokens_per_s,
                        **of_forecast(one.gain),
                    }
                    for one in planned.trees.get(streams, [])
                ],
            }
            for streams, times in planned.times.items()
        },
    }


def of_forecast(one: Forecast) -> dict[str, Any]:
    return one._asdict() | {"tau": one.tau._asdict(), "speedup": one.speedup._asdict()}


def recommended(planned: list[Planned], streams: int) -> Planned | None:
    """The greatest expected speed-up; None where nothing is expected to pay."""
    known = [
        (best.speedup.value, one) for one in planned if (best := one.best(streams)) is not None
    ]
    speedup, chosen = max(known, key=lambda pair: pair[0], default=(0.0, None))
    return chosen if speedup > 1 else None


def table(plan: Plan) -> str:
    config, load, _, data, planned, refused, offloaded = plan
    parts = [data_line(data, generated=not config.data)]
    if offloaded is not None:
        assert config.target_offload is not None
        most = max(config.streams)
        parts.append(offloaded_table(planned, offloaded, config.target_offload, most))
        parts += [*busy_line(load), *too_large(plan), *left_out(refused)]
        return "\n\n".join(parts)
    for streams in sorted(set(config.streams)):
        one = planned[0].times[streams]
        parts.append(
            f"{streams} stream{'s' if streams > 1 else ''}, a plain round {one.pass_ms:.2f} "
            f"ms:\n\n{rows_of(planned, streams)}"
        )
        parts += by_length(planned, streams)
        parts += by_tree(planned, streams)
        parts.append(advice(config, planned, streams))
    notes = sorted(
        {
            f"{one.candidate.family}: {one.expectation.source}"
            for one in planned
            if one.expectation is not None
        }
    )
    parts.append(
        "tau is expected from\n" + "\n".join(f"  {note}" for note in notes)
        if notes
        else "no acceptance is known yet"
    )
    parts += busy_line(load)
    if config.target_shares > 1:
        parts.append(shares_line(config.target_shares, started()))
    parts += [*too_large(plan), *left_out(refused)]
    parts.append(
        "needs: the tau at which drafting neither gains nor costs. Times are of this machine "
        "and of forwards alone: a server's own work per round, as much with drafts as without, "
        "moves speed-ups of very fast targets towards tau."
    )
    return "\n\n".join(parts)


def busy_line(load: float) -> list[str]:
    if load <= BUSY * (os.cpu_count() or 1):
        return []
    return [
        f"this machine was busy with other work (load {load:.1f}): times are unreliable; "
        "plan again when it is idle"
    ]


def left_out(refused: dict[str, str]) -> list[str]:
    return [f"{name} is left out: {reason}" for name, reason in refused.items()]


def too_large(plan: Plan) -> list[str]:
    """A sentence on the drafts that cannot be trained here beside the target as it was planned, and
    the options with which all of them can be; none where all fit."""
    config, device = plan.config, plan.target.device
    room = available_bytes(device)
    large = [one for one in plan.planned if one.cost.train_memory_bytes >= room]
    if not large:
        return []
    given = {"shares": config.target_shares > 1, "offload": config.target_offload is not None}
    ways = ways_to_fit(
        parts_of(plan.target.model),
        device,
        beside=max(TRAINED_BYTES * one.cost.parameters for one in large),
        without=[name for name, is_given in given.items() if is_given],
    )
    return [
        f"training {', '.join(one.candidate.name for one in large)} takes more than the "
        f"{gib(room)} of this {device.type}; "
        + (ways or "give --deepspeed recipes/zero3.json, or choose a smaller draft")
    ]


def shares_line(shares: int, processes: int) -> str:
    """Meaning of memory and times of a target in shares."""
    text = f"memory is of each process that trains, with the target's layers in {shares} shares"
    if processes == 1:
        return (
            f"{text}; times are of one process with the whole target, to which gathering layers "
            f"adds: start {shares} with torchrun to time that"
        )
    return (
        f"{text}; train h is of all {processes} processes, without the sum of their gradients; "
        "rounds gather every layer too, which serve --tensor-parallel does not"
    )


def data_line(data: Data, *, generated: bool) -> str:
    text = (
        f"data: {data.tokens:,} tokens, {gib(data.bytes)}, with stored distributions "
        f"{gib(data.distributions_bytes)} more"
    )
    return (
        f"{text}; {data.generate_hours:.1f} h to generate"
        if generated and data.generate_hours is not None
        else text
    )


def rows_of(planned: list[Planned], streams: int) -> str:
    ordered = sorted(
        planned,
        key=lambda one: -best.speedup.value if (best := one.best(streams)) is not None else 1.0,
    )
    return aligned([HEAD, *(row_of(one, streams) for one in ordered)])


def by_length(planned: list[Planned], streams: int) -> list[str]:
    """Speed-ups of the drafts of known acceptance at every k; nothing for fewer than two."""
    lines = []
    for one in planned:
        if forecasts := one.forecasts(streams):
            cells = "  ".join(f"{each.k}: {each.speedup.value:.2f}" for each in forecasts)
            lines.append(f"  {one.candidate.name}  {cells}")
    return ["speed-up by k:\n" + "\n".join(lines)] if len(lines) > 1 else []


def by_tree(planned: list[Planned], streams: int) -> list[str]:
    """Figures of draft trees by shape, beside those of the draft's best chain."""
    lines = []
    for one in planned:
        if trees := one.trees.get(streams):
            best = one.best(streams)
            assert best is not None
            plain_ms = one.times[streams].pass_ms
            rate = 1e3 * streams * best.speedup.value / plain_ms
            lines.append(tree_line(one.candidate.name, f"chain, k = {best.k}", best, rate))
            lines += [
                tree_line(one.candidate.name, each.tree, each.gain, each.tokens_per_s)
                for each in trees
            ]
    return ["draft trees by shape:\n" + "\n".join(lines)] if lines else []


def tree_line(name: str, shape: str, gain: Forecast, tokens_per_s: float) -> str:
    return (
        f"  {name}  {shape}: tau {interval(gain.tau)}, needs {gain.break_even:.2f}, speed-up "
        f"{interval(gain.speedup)}, {tokens_per_s:.0f} tok/s"
    )


def row_of(planned: Planned, streams: int) -> tuple[str, ...]:
    best, cost = planned.best(streams), planned.cost
    k = best.k if best is not None else min(4, max(planned.times[streams].cost))
    return (
        planned.candidate.name,
        ",".join(map(str, planned.taps)) or "-",
        f"{cost.parameters / 1e6:.1f} M",
        str(k),
        "?" if best is None else interval(best.tau),
        f"{planned.times[streams].cost[k].value:.2f}",
        "?" if best is None else interval(best.speedup),
        f"{cost.train_hours:.2f}",
        gib(cost.train_memory_bytes),
        gib(cost.run_bytes),
        gib(cost.taps_bytes),
    )


def advice(config: PlanConfig, planned: list[Planned], streams: int) -> str:
    chosen = recommended(planned, streams)
    if chosen is None:
        return (
            "no draft is expected to pay here; serve --suffix costs nothing to train, and --k "
            "auto never drafts where it loses"
        )
    best = chosen.best(streams)
    assert best is not None
    words = " ".join(
        [
            f"draftsmith train {chosen.candidate.family} --target {config.target} --data DATA "
            "--out DRAFT",
            *chosen.candidate.overrides,
        ]
    )
    return f"{words}\ndraftsmith serve --target {config.target} --draft DRAFT --k {best.k}"
