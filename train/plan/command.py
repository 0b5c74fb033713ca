"""`draftsmith plan`: the draft to train for this target, its expected gain, and what the run
takes."""

from __future__ import annotations

import json
import os

from draftsmith.config import check_limits
from draftsmith.errors import UserError
from draftsmith.train.plan.config import PlanConfig
from draftsmith.train.quiet import quiet


def run(config: PlanConfig) -> int:
    check(config)
    quiet()
    # Import late: these libraries log at import.
    if config.data_curve:
        from draftsmith.train.plan.data_curve import curve_table, data_curve

        found = data_curve(config)
        print(json.dumps(found, indent=2) if config.json else curve_table(found))
        return 0
    from draftsmith.train.plan.make import planned_by_all
    from draftsmith.train.plan.report import report, table

    plan = planned_by_all(config)
    if plan is not None:
        print(json.dumps(report(plan), indent=2) if config.json else table(plan))
    return 0


def check(config: PlanConfig) -> None:
    check_limits(config)
    if not config.streams:
        raise UserError("streams is empty; give numbers of requests, for example 1 8")
    if config.data_curve and (not config.data or config.out is None or len(config.families) > 1):
        raise UserError(
            "--data-curve trains one family on --data into --out; give both, and one of --families "
            "at most"
        )
    processes = os.environ.get("WORLD_SIZE") or "1"
    if config.data_curve and processes != "1":
        raise UserError(
            f"WORLD_SIZE is {processes}, but --data-curve trains in one process; start it without "
            "a launcher"
        )
    if int(processes) % config.target_shares and processes != "1":
        raise UserError(
            f"option 'target_shares' is {config.target_shares} but {processes} processes run; "
            f"start a multiple of {config.target_shares}, or one process alone"
        )
    check_target_offload(config)
    if not config.data_curve and (config.out, config.recipe) != (None, None):
        raise UserError("--out and --recipe are of --data-curve; give it too")


def check_target_offload(config: PlanConfig) -> None:
    if config.target_offload is None:
        return
    # Late, for what it imports.
    quiet()
    from draftsmith.drafters.target.sharded import check_offload

    check_offload(config.target_offload, shares=config.target_shares, dtype="auto")
    if config.data_curve:
        raise UserError(
            f"--target-offload is {config.target_offload!r} and --data-curve decodes, for which "
            "the whole target would be read again in every round; leave one of the two out"
        )
    if config.draft_lm is not None and config.draft_lm.target_layers is not None:
        raise UserError(
            f"option 'draft_lm.target_layers' is {config.draft_lm.target_layers} and copies layers "
            "of a target whose weights are here, not offloaded; give draft_lm.hidden_size, or "
            "leave target_offload out"
        )
