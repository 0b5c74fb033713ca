"""A plan: every candidate created, run, trained for a step, and forecast."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import redirect_stderr
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from draftsmith.drafters.checkpoint import locate, read_metadata
from draftsmith.drafters.compiled.captured import capture_forwards
from draftsmith.drafters.interface import ForwardCapturable
from draftsmith.drafters.options import OPTIONS, DrafterOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.device import device_of, load_target, weight_dtype
from draftsmith.drafters.target.ranks import LEADER, join, leave_group, started
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.train.data.mixture import Mixture, read_mixture
from draftsmith.train.doctor.memory import Served, check_fit, refuse_unfit
from draftsmith.train.doctor.processes import fit_of_all
from draftsmith.train.plan.candidates import Candidate, Planned, candidates
from draftsmith.train.plan.config import PlanConfig
from draftsmith.train.plan.costs import Data, cost_of, data_of
from draftsmith.train.plan.expected import Expectation, published, recorded, stated, trained_shape
from draftsmith.train.plan.offloaded import time_reading
from draftsmith.train.plan.report import Plan
from draftsmith.train.plan.timing import decode_tokens_per_s, time_rounds
from draftsmith.train.plan.trees import TreeForecast, forecast_tree

GENERATE_ROWS = 16  # answers written at once while data is generated


def planned_by_all(config: PlanConfig) -> Plan | None:
    """The plan; None on all processes of a launcher but the first, which run what it runs."""
    if started() == 1:
        return make_plan(config)
    join(device_of())
    try:
        if dist.get_rank() == LEADER:
            return make_plan(config)
        with open(os.devnull, "w") as nothing, redirect_stderr(nothing):
            make_plan(config)
        return None
    finally:
        leave_group()


def make_plan(config: PlanConfig) -> Plan:
    load = os.getloadavg()[0]
    target = open_target(config)
    corpus = corpus_of(config, target) if config.data else None
    counts = None if corpus is None else corpus.token_counts(target.vocab_size)
    records = {name: read_metadata(locate(name, weights=False)) for name in config.draft}
    trained: dict[str, dict[str, DrafterOptions]] = defaultdict(dict)
    for name, record in records.items():
        trained[record["family"]][name] = trained_shape(record)
    chosen = candidates(config, trained, num_layers=target.num_layers, token_counts=counts)
    expectations = Expectations.of(config, records)
    data = planned_data(config, corpus)
    planned: list[Planned] = []
    refused: dict[str, str] = {}
    progress = Progress("plan", len(chosen), unit="drafts")
    for candidate in chosen:
        try:
            planned.append(
                plan_for(config, target, candidate, data, expectations.for_(candidate), counts)
            )
        except UserError as error:
            refused[candidate.name] = str(error)
        progress.update(len(planned) + len(refused))
    progress.close()
    if not planned:
        raise UserError(
            f"no draft can be planned for {config.target!r}: {next(iter(refused.values()))}"
        )
    if config.target_offload is not None:
        found = time_reading(target, config.target_offload)
        return Plan(config, load, target, data, planned, refused, found)
    if corpus is None:
        data = data_of(data.tokens, generation_speed(config, target, planned[0]))
    return Plan(config, load, target, data, planned, refused)


def open_target(config: PlanConfig) -> Target:
    """Raises `UserError` where it does not fit, before it is loaded."""
    device, trust = device_of(), config.trust_remote_code
    shares, offload = shares_here(config), config.target_offload
    dtype = weight_dtype("auto", device, config.target, trust_remote_code=trust)
    found = check_fit(
        config.target,
        device,
        dtype=dtype,
        shares=shares,
        offload=offload,
        trust_remote_code=trust,
    )
    if started() > 1:
        found = fit_of_all(found)
    if found is not None and found.mend and config.target_shares > shares:
        count = config.target_shares
        found = found._replace(
            mend=f"start {count} processes with torchrun --nproc_per_node {count} -m "
            "draftsmith.cli plan ..."
        )
    refuse_unfit(found)
    return load_target(
        config.target, dtype=dtype, shares=shares, offload=offload, trust_remote_code=trust
    )


def shares_here(config: PlanConfig) -> int:
    """Shares that the target is really loaded in: one process alone has the whole of it."""
    return 1 if started() == 1 else config.target_shares


def corpus_of(config: PlanConfig, target: Target) -> Mixture:
    return read_mixture(config.data, target, max_length=target.max_positions, held_out_share=0.0)


def planned_data(config: PlanConfig, corpus: Mixture | None) -> Data:
    tokens = config.answers * config.tokens if corpus is None else corpus.tokens_per_epoch()
    return data_of(tokens, None)


class Expectations(NamedTuple):
    """Expected acceptance: stated before measured, and that before published."""

    stated: dict[str, Expectation]  # by family
    measured: dict[str, dict[str, Expectation]]  # by family and name of the draft

    @classmethod
    def of(cls, config: PlanConfig, records: Mapping[str, dict[str, Any]]) -> Expectations:
        measured: dict[str, dict[str, Expectation]] = defaultdict(dict)
        for name, record in records.items():
            measured[record["family"]][name] = recorded(
                record, config.temperature, name, draft_sampling=config.draft_sampling
            )
        return cls(stated(config.alpha, list(OPTIONS)), measured)

    def for_(self, candidate: Candidate) -> Expectation | None:
        family = candidate.family
        if family in self.stated:
            return self.stated[family]
        if measured := self.measured.get(family):
            # The last one where a shape was asked for, which is none of them.
            return measured.get(candidate.draft, list(measured.values())[-1])
        return published(family)


def plan_for(
    config: PlanConfig,
    target: Target,
    candidate: Candidate,
    data: Data,
    expectation: Expectation | None,
    token_counts: torch.Tensor | None,
) -> Planned:
    drafter: Any = FAMILIES[candidate.family].create(
        candidate.options, target, seed=0, token_counts=token_counts
    )
    cost = cost_of(
        target,
        drafter.to(device=target.device, dtype=torch.float32),
        tokens=data.tokens,
        epochs=config.epochs,
        shares=config.target_shares,
        offload=config.target_offload,
        processes=started(),
    )
    drafter = drafter.to(device=target.device, dtype=target.dtype).eval()
    offloaded = config.target_offload is not None
    if shares_here(config) == 1 and not offloaded:
        # As the engine does it where there is a CPU.
        capture_forwards(target, drafter)
    elif isinstance(drafter, ForwardCapturable):
        drafter.capture_forward()
    needed = Served.of(target, drafter).whole(max(config.streams), config.context)
    times, trees = {}, {}
    # A server holds the whole target, so rounds that read it are none of a server's.
    if not offloaded:
        times = {
            rows: time_rounds(target, drafter, rows=rows, k=config.k, context=config.context)
            for rows in sorted(set(config.streams))
        }
        trees = tree_forecasts(config, target, drafter, expectation)
    return Planned(candidate, cost, times, expectation, tuple(drafter.taps), trees, needed)


def tree_forecasts(
    config: PlanConfig, target: Target, drafter: Any, expectation: Expectation | None
) -> dict[int, list[TreeForecast]]:
    """Forecasts by the number of streams, of all shapes that were measured with the draft."""
    measured = () if expectation is None else expectation.trees
    return {
        rows: [
            forecast_tree(
                target, drafter, tree, tau, rows=rows, context=config.context,
                temperature=config.temperature,
            )
            for tree, tau in measured
        ]
        for rows in sorted(set(config.streams))
        if measured
    }  # fmt: skip


def generation_speed(config: PlanConfig, target: Target, planned: Planned) -> float:
    drafter = FAMILIES[planned.candidate.family].create(planned.candidate.options, target, seed=0)
    return decode_tokens_per_s(target, drafter.eval(), rows=GENERATE_ROWS, context=config.context)
