"""The quickstart's result: one table and one picture from the files that its stages left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers

from draftsmith.drafters.published import versions
from draftsmith.files import read_json, write_json, write_text
from scripts.demo.traffic import pooled_alpha, read_shift

WINDOW = 30  # requests an alpha of the curve is pooled over
DRAFTERS = ("draft-lm", "eagle3", "eagle3-shipped")


def write_report(run: Path, padded: Path) -> None:
    """`padded` is the target of the speeds."""
    files = {name: run / f"bench-{name}.json" for name in DRAFTERS}
    benches = {name: read_json(file) for name, file in files.items() if file.exists()}
    evaluations = {name: read_json(run / f"eval-{name}.json") for name in ("draft-lm", "eagle3")}
    shift, decisions = read_shift(run), versions.read_decisions(run / "versions")
    gain = {
        side: read_json(run / f"gain-{side}.json")["evaluation"][0] for side in ("first", "live")
    }
    published = {
        number: versions.read_manifest(run / "versions", number)
        for number in versions.versions(run / "versions")
    }
    parts = [
        speed_title(padded),
        speed_table(benches, evaluations),
        shift_table(shift),
        gain_table(gain),
        decision_table(decisions),
        "exported: "
        + ", ".join(
            str(path.relative_to(run.parent.parent)) for path in sorted((run / "export").iterdir())
        ),
        f"picture: {(run / 'quickstart.png').relative_to(run.parent.parent)}",
    ]
    draw(run / "quickstart.png", benches, evaluations, shift, gain, published, decisions)
    write_text(run / "report.txt", "\n\n".join(parts) + "\n")
    write_json(
        run / "report.json",
        {
            "command": "scripts/quickstart",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "cores": os.cpu_count(),
            "stage_seconds": stage_seconds(run),
            "bench": benches,
            "eval": evaluations,
            "decisions": decisions,
            "shift": segments(shift) | {"dropped": shift["dropped"]},
            "gain": gain,
        },
    )


def stage_seconds(run: Path) -> dict[str, float]:
    """Seconds of the finished stages; the report's own is not among them."""
    markers = sorted((run / "finished").glob("*.json"), key=lambda path: path.stat().st_mtime)
    return {path.stem: read_json(path)["seconds"] for path in markers}


def speed_title(padded: Path) -> str:
    record = read_json(padded / "config.json")["padded"]
    return (
        f"one stream on a target of {record['parameters']:,} parameters, float32: the text of the "
        f"small one ({record['source_parameters']:,}), padded to the price of a larger one"
    )


def speed_table(benches: dict[str, Any], evaluations: dict[str, Any]) -> str:
    lines = [
        f"{'drafter':<15}{'T':>3}{'tok/s off':>11}{'tok/s on':>10}{'on/off':>8}{'tau served':>22}{'tau predicted':>22}"
    ]
    for name, bench in benches.items():
        for ratio in bench["ratios"]:
            temperature = ratio["temperature"]
            off, on = case(bench, temperature, "off"), case(bench, temperature, "on")
            served = on["acceptance"]
            tau = interval(served["tau"], served["tau_95"]) if served else "-"
            lines.append(
                f"{name:<15}{temperature:>3g}{off['tokens_per_s']:>11.1f}{on['tokens_per_s']:>10.1f}{ratio['speedup']:>8.2f}"
                f"{tau:>22}{predicted(evaluations.get(name), temperature):>22}"
            )
    return "\n".join(lines)


def case(bench: dict[str, Any], temperature: float, mode: str) -> dict[str, Any]:
    return next(
        found
        for found in bench["cases"]
        if found["temperature"] == temperature and found["mode"] == mode
    )


def predicted(evaluation: dict[str, Any] | None, temperature: float) -> str:
    tau = predicted_tau(evaluation, temperature)
    return "-" if tau is None else interval(tau["value"], (tau["low"], tau["high"]))


def predicted_tau(evaluation: dict[str, Any] | None, temperature: float) -> dict[str, float] | None:
    found = (
        []
        if evaluation is None
        else [e for e in evaluation["evaluation"] if e["temperature"] == temperature]
    )
    return found[0]["tau"] if found else None


def interval(value: float, bounds: tuple[float, float] | list[float]) -> str:
    return f"{value:.2f} [{bounds[0]:.2f}, {bounds[1]:.2f}]"


def segments(shift: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """alpha and tau on code, right after the shift, and over the last third of the prose."""
    code = shift["code"]
    total = max(record["index"] for record in shift["served"]) + 1
    third = (total - code) // 3
    bounds = {
        "code": (0, code),
        "prose, first third": (code, code + third),
        "prose, last third": (total - third, total),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, (begin, end) in bounds.items():
        records = [record for record in shift["served"] if begin <= record["index"] < end]
        found[name] = {
            "alpha": pooled_alpha(records),
            "tau": sum(r["tokens"] for r in records) / max(1, sum(r["rounds"] for r in records)),
            "requests": len(records),
        }
    return found


def shift_table(shift: dict[str, Any]) -> str:
    lines = [f"{'served while learning, T = 1':<30}{'requests':>9}{'alpha':>8}{'tau':>7}"]
    for name, found in segments(shift).items():
        lines.append(f"{name:<30}{found['requests']:>9}{found['alpha']:>8.3f}{found['tau']:>7.2f}")
    lines.append(f"requests answered: {len(shift['served'])}; dropped: {shift['dropped']}")
    return "\n".join(lines)


def gain_table(gain: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'other prose, T = 1':<30}{'alpha_1':>24}{'tau':>20}"]
    for side, found in gain.items():
        first, tau = found["alpha"][0], found["tau"]
        alpha = f"{first['value']:.3f} [{first['low']:.3f}, {first['high']:.3f}]"
        lines.append(
            f"{side + ' draft':<30}{alpha:>24}{interval(tau['value'], (tau['low'], tau['high'])):>20}"
        )
    first, live = (gain[side]["tau"]["value"] for side in ("first", "live"))
    lines.append(f"live / first: {live / first:.3f} of tau, on the same texts")
    return "\n".join(lines)


def offline_alpha(evaluation: dict[str, Any]) -> float:
    """Pooled alpha that an evaluation predicts for live requests: of every position tried."""
    tried, reached = 0.0, 1.0
    for alpha in evaluation["alpha"]:
        tried += reached
        reached *= alpha["value"]
    return (evaluation["tau"]["value"] - 1) / tried


def decision_table(decisions: list[dict[str, Any]]) -> str:
    lines = [
        f"{'gate':<12}{'version':>8}{'alpha live':>12}{'candidate':>11}{'requests':>10}  reason"
    ]
    for decision in decisions:
        version = decision.get("version")
        lines.append(
            f"{decision['decision']:<12}{'-' if version is None else version:>8}{number(decision.get('alpha_live')):>12}"
            f"{number(decision.get('alpha_candidate')):>11}{decision.get('requests', '-'):>10}  "
            f"{decision.get('reason', '')}"
        )
    return "\n".join(lines)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def draw(
    path: Path,
    benches: dict[str, Any],
    evaluations: dict[str, Any],
    shift: dict[str, Any],
    gain: dict[str, dict[str, Any]],
    published: dict[int, dict[str, Any]],
    decisions: list[dict[str, Any]],
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((speed, tau), (live, gate)) = pyplot.subplots(2, 2, figsize=(11, 7))
    draw_speed(speed, benches)
    draw_tau(tau, benches, evaluations)
    draw_shift(live, shift, gain, published)
    draw_decisions(gate, decisions)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_speed(axes: Any, benches: dict[str, Any]) -> None:
    labels, values, colours = [], [], []
    for name, bench in benches.items():
        for ratio in bench["ratios"]:
            labels.append(tick(name, ratio["temperature"]))
            values.append(ratio["speedup"])
            colours.append("tab:blue" if ratio["temperature"] == 0 else "tab:orange")
    bars = axes.bar(labels, values, color=colours)
    axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(title="tok/s, speculation on / off (one stream)", ylabel="ratio")
    axes.tick_params(axis="x", labelsize=7)


def draw_tau(axes: Any, benches: dict[str, Any], evaluations: dict[str, Any]) -> None:
    ticks = []
    for place, (name, temperature) in enumerate((name, t) for name in benches for t in (0.0, 1.0)):
        ticks.append(tick(name, temperature))
        served = case(benches[name], temperature, "on")["acceptance"]
        if served:
            mark(axes, place - 0.1, served["tau"], served["tau_95"], "tab:green", "served")
        expected = predicted_tau(evaluations.get(name), temperature)
        if expected:
            mark(
                axes,
                place + 0.1,
                expected["value"],
                (expected["low"], expected["high"]),
                "tab:purple",
                "predicted offline",
            )
    axes.set(title="acceptance length tau, 95 % intervals", ylabel="tokens a target pass")
    axes.set_xticks(range(len(ticks)), ticks, fontsize=7)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    axes.legend(handles.values(), handles.keys(), fontsize=8)


def tick(name: str, temperature: float) -> str:
    return "\n".join([name.replace("-shipped", ",\nshipped"), f"T={temperature:g}"])


def mark(axes: Any, place: float, value: float, bounds: Any, colour: str, label: str) -> None:
    error = [[max(0.0, value - bounds[0])], [max(0.0, bounds[1] - value)]]
    axes.errorbar([place], [value], yerr=error, fmt="o", color=colour, label=label, capsize=3)


def draw_shift(
    axes: Any,
    shift: dict[str, Any],
    gain: dict[str, dict[str, Any]],
    published: dict[int, dict[str, Any]],
) -> None:
    records = shift["served"]
    groups = [records[max(0, end - WINDOW) : end] for end in range(WINDOW // 2, len(records) + 1)]
    axes.plot(
        [group[-1]["index"] for group in groups],
        [pooled_alpha(group) for group in groups],
        color="tab:blue",
        label="served while learning",
    )
    for side, colour in (("first", "tab:grey"), ("live", "tab:green")):
        label = f"{side} draft, other prose"
        begin, end = shift["code"], len(records)
        alpha = offline_alpha(gain[side])
        axes.plot([begin, end], [alpha, alpha], color=colour, linestyle=":", label=label)
    axes.axvline(shift["code"], color="black", linestyle="--", linewidth=0.8)
    axes.text(shift["code"], axes.get_ylim()[1], " code | prose", fontsize=8, va="top")
    for version, manifest in published.items():
        before = [
            record["index"]
            for record in shift["served"]
            if record["ended_s"] < manifest["created_s"]
        ]
        if version > 1 and before:
            axes.axvline(max(before), color="tab:green", linewidth=0.7, alpha=0.6)
            axes.text(
                max(before),
                axes.get_ylim()[0],
                f"v{version}",
                fontsize=7,
                color="tab:green",
                va="bottom",
            )
    axes.set(
        title=f"alpha over live requests, T = 1 (pooled over {WINDOW})",
        xlabel="request",
        ylabel="alpha",
    )
    axes.legend(fontsize=8, loc="lower left")


def draw_decisions(axes: Any, decisions: list[dict[str, Any]]) -> None:
    weighed = [decision for decision in decisions if decision.get("alpha_candidate") is not None]
    colours = {"accept": "tab:green", "hold": "tab:orange", "refuse": "tab:red"}
    for place, decision in enumerate(weighed):
        gain = decision["alpha_candidate"] - decision["alpha_live"]
        axes.bar([place], [gain], color=colours.get(decision["decision"], "tab:grey"))
    for name, colour in colours.items():
        axes.bar([0], [0], color=colour, label=name)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set(
        title="gate: alpha of the candidate - alpha of the live draft",
        xlabel="decision",
        ylabel="difference on held-out traffic",
    )
    axes.legend(fontsize=8)
