"""The quickstart's result: tables from the files that its stages left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.files import read_json, with_interval, write_page, write_text
from scripts.demo.traffic import pooled_alpha

REAL = "bench-demo.json"
DRAFTERS = ("draft-lm", "eagle3", "eagle3-shipped")


def write_report(run: Path) -> None:
    files = {name: run / f"bench-{name}.json" for name in DRAFTERS}
    benches = {name: read_json(file) for name, file in files.items() if file.exists()}
    evaluations = {name: read_json(run / f"eval-{name}.json") for name in ("draft-lm", "eagle3")}
    shift = read_json(run / "shift.json")
    gain = {
        side: read_json(run / f"gain-{side}.json")["evaluation"][0] for side in ("first", "live")
    }
    real = [real_line(read_json(run / REAL))] if (run / REAL).exists() else []
    parts = [
        *real,
        "one stream on the shipped target, float32; it is small, so that a draft costs much beside it",
        speed_table(benches, evaluations),
        shift_table(shift),
        gain_table(gain),
        "exported: "
        + ", ".join(
            str(path.relative_to(run.parent.parent)) for path in sorted((run / "export").iterdir())
        ),
    ]
    text = "\n\n".join(parts) + "\n"
    write_text(run / "report.txt", text)
    curves = sorted(run.glob("*/curves.png"))
    write_page(run / "report.html", "quickstart", "scripts/quickstart", text, curves)


def real_line(bench: dict[str, Any]) -> str:
    off, on = (case(bench, 0.0, mode)["tokens_per_s"] for mode in ("off", "on"))
    return (
        f"SmolLM2-135M, {bench['cases'][0]['num_answers']} answers to Spec-Bench, greedy: {off:.1f} tok/s, "
        f"with drafts from text and answers {on:.1f}"
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
            tau = with_interval(served["tau"], *served["tau_95"]) if served else "-"
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
    found = [] if evaluation is None else evaluation["evaluation"]
    taus = [one["tau"] for one in found if one["temperature"] == temperature]
    return with_interval(**taus[0]) if taus else "-"


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
        alpha, tau = with_interval(**found["alpha"][0], digits=3), with_interval(**found["tau"])
        lines.append(f"{side + ' draft':<30}{alpha:>24}{tau:>20}")
    first, live = (gain[side]["tau"]["value"] for side in ("first", "live"))
    lines.append(f"live / first: {live / first:.3f} of tau, on the same texts")
    return "\n".join(lines)
