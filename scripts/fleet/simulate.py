"""Rollouts of a simulated fleet, with and without jitter and with failures, as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftsmith.fleet.config import RolloutConfig
from scripts.fleet.model import Shape
from scripts.fleet.simulation import Simulation

HOUR_S = 3600.0
PUBLISHED_S = 60.0


def scenarios(
    shape: Shape, stages: tuple[float, ...]
) -> dict[str, tuple[Shape, tuple[float, ...]]]:
    """Shape and stages by name. Version 2 is what is published; -0.05 is a bad candidate."""
    failing = replace(
        shape, deaths_per_hour=0.5, down=((900.0, 1200.0), (4000.0, 4300.0)), gains=((2, 0.03),)
    )
    return {
        "at once, no jitter": (replace(shape, has_jitter=False), ()),
        "at once, jitter": (shape, ()),
        "stages, failures": (failing, stages),
        "stages, bad candidate": (replace(failing, gains=((2, -0.05),)), stages),
        "stages, torn upload": (replace(failing, torn=(2,)), stages),
    }


def simulate(
    shape: Shape, stages: Sequence[float], config: RolloutConfig, *, until_s: float
) -> dict[str, Any]:
    run = Simulation(shape, stages, config)
    run.run(PUBLISHED_S)
    run.publish(2)
    run.run(until_s)
    return run.report(2)


def line(name: str, found: dict[str, Any]) -> str:
    requests, size = found["requests_per_s"], found["bytes_per_s"]
    came_s = found["all_on_it_s"]
    came = "-" if came_s is None else f"{came_s - PUBLISHED_S:.0f} s"
    decided = ", ".join(one["decision"] for one in found["decisions"]) or "-"
    return (
        f"| {name} | {found['share_on_it']:.1%} | {came} | {requests['peak']} | "
        f"{requests['mean']:.0f} | {size['peak'] / 1e9:.1f} | {size['sum'] / 1e12:.2f} | "
        f"{found['engine_hours_on_it']:.0f} | {decided} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--stages", type=float, nargs="+", default=[0.05, 0.25])
    parser.add_argument("--json", action="store_true", help="all figures instead of a table")
    options = parser.parse_args()
    shape, config = Shape(engines=options.engines), RolloutConfig()
    found = {
        name: simulate(
            one, stages, config, until_s=options.hours * HOUR_S if stages else 0.25 * HOUR_S
        )
        for name, (one, stages) in scenarios(shape, tuple(options.stages)).items()
    }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"{shape.engines} engines, a draft of {shape.draft_bytes / 1e9:g} GB, a poll each {shape.poll_s:g} s\n"
    )
    print(
        "| rollout | share on it at the end | last engine on it | peak requests/s | mean | "
        "peak GB/s | TB | engine hours on it | decisions |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, one in found.items():
        print(line(name, one))
    for name, one in found.items():
        for decision in one["decisions"]:
            if decision["reason"]:
                print(
                    f"\n{name}: {decision['decision']} at {decision['stage']:.0%}: {decision['reason']}"
                )


if __name__ == "__main__":
    main()
