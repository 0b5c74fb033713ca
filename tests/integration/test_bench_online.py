"""The benchmark of online learning at sizes that say nothing but that it works; and what its report
makes of figures."""

from __future__ import annotations

import importlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target

Script = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def script() -> Script:
    """A module of the benchmark by its name."""
    return lambda name: importlib.import_module(f"scripts.bench.online.{name}")


@pytest.fixture(scope="module")
def work(tiny_target: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and an untrained draft stand where those that take minutes would be trained."""
    folder = tmp_path_factory.mktemp("online")
    (folder / "target").symlink_to(tiny_target("llama"))
    target = Target.load(str(folder / "target"))
    draft = FAMILIES["eagle3"].create(Eagle3Options(), target, seed=0)
    checkpoint.save(draft, folder / "seed-0" / "warm", target)
    return folder


@pytest.mark.long
def test_streams_are_served_learned_from_told_and_kept(
    script: Script, work: Path, tmp_path: Path
) -> None:
    bench = script("run")
    names = ("baselines", "sudden")
    arguments = [
        "--work",
        work,
        "--out",
        tmp_path / "online",
        "--seeds",
        1,
        "--requests",
        24,
        "--only",
        *names,
    ]
    bench.main([str(argument) for argument in arguments])
    report = json.loads((tmp_path / "online.json").read_text())
    assert [row["cell"]["name"] for row in report["rows"]] == list(names)
    by_name = {row["cell"]["name"]: row["result"] for row in report["rows"]}
    assert sum(chunk["requests"] for chunk in by_name["sudden"]["curve"]) == 24 + 2 * 8
    assert by_name["sudden"]["updates"] > 0 and 0 < by_name["sudden"]["compared"]["online"] <= 1
    assert by_name["baselines"]["static"].keys() == {"code", "prose", "headers"}
    told = (tmp_path / "online.md").read_text()
    assert told.startswith(
        "24 requests after the shift of 24 + 48 tokens at T = 0.7, batch 16, EAGLE-3 with k = 3, "
        "2 cells finished"
    )
    assert "| alpha gained after the shift to prose |" in told and "| sudden | 1 | 40 |" in told
    assert (tmp_path / "online.png").stat().st_size > 1000 and not list((work / "room").iterdir())
    kept = {path: path.stat().st_mtime_ns for path in (work / "seed-0" / "curves").iterdir()}
    bench.main([str(argument) for argument in [*arguments, "--report"]])
    bench.main([str(argument) for argument in arguments])
    assert kept == {
        path: path.stat().st_mtime_ns for path in (work / "seed-0" / "curves").iterdir()
    }


def planted(values: list[float]) -> list[Any]:
    """Scores of texts with 20 positions of the same alpha."""
    scored = importlib.import_module("draftsmith.distill.gate.scoring").Scored
    return [
        scored(np.full(20, value), np.zeros(20), ["1"] * 20, True, np.zeros((20, 2)))
        for value in values
    ]


def test_a_bank_returns_to_a_version_by_evidence_and_an_oracle_at_once(script: Script) -> None:
    bounds = script("bounds")
    domains = ["prose"] * 40 + ["code"] * 80
    live = [1] * 8 + [2] * 112
    # the second version is better on prose and worse on code
    scores = {1: planted([0.5] * 120), 2: planted([0.75] * 40 + [0.25] * 80)}
    means = [float(one.mean()) for one in bounds.with_bank(scores, live)]
    assert means[:8] == [0.5] * 8 and means[8:40] == [0.75] * 32
    back = means.index(0.5, 40)
    assert 40 < back <= 96 and set(means[back:]) == {0.5}
    best = [float(one.mean()) for one in bounds.best_by_domain(scores, live, domains)]
    assert best == [0.5] * 8 + [0.75] * 32 + [0.5] * 80


@pytest.mark.long
def test_learning_is_priced_by_its_options(script: Script, work: Path, tmp_path: Path) -> None:
    names = ["8-per-8", "recorded", "1-per-8", "osd"]
    arguments = ["--work", work, "--out", tmp_path / "cost", "--seeds", 1, "--requests", 120]
    script("run").main([str(argument) for argument in [*arguments, "--only", *names]])
    report = json.loads((tmp_path / "cost.json").read_text())
    dear, recorded, cheap, osd = (row["result"] for row in report["rows"])
    assert dear["steps"] == 8 * cheap["steps"] > 0 and dear["texts"] == cheap["texts"]
    assert dear["positions"] > 4 * cheap["positions"]
    # Not which is dearer: at this size one compilation costs more than eight steps.
    assert min(row["training_s"] for row in (dear, recorded, cheap)) > 0
    # the bonus token and the prompt's last one are not recorded
    assert 0 < recorded["positions"] < dear["positions"]
    assert recorded["reading_s"] == 0 < dear["reading_s"]
    # each eight texts of an own step, at their first rejected tokens alone
    assert 8 * osd["steps"] == osd["texts"] > 0
    assert osd["positions"] / osd["steps"] < cheap["positions"] / cheap["steps"]
    told = (tmp_path / "cost.md").read_text()
    assert "| 8 per 8 | 1 |" in told and "| 1 per 8 | 1 |" in told
    assert "| 8 per 8, `learn.teacher=recorded` | 1 |" in told
    assert "| 1 per 8, `osd.yaml` | 1 |" in told


@pytest.mark.long
def test_a_padded_target_is_priced_in_cells_of_its_own(
    script: Script, work: Path, tmp_path: Path
) -> None:
    def report(*more: str) -> dict[str, Any]:
        arguments = ["--work", work, "--seeds", 1, "--requests", 48, "--only", "half-batch"]
        script("run").main([str(one) for one in [*arguments, "--out", tmp_path / "cost", *more]])
        return json.loads((tmp_path / "cost.json").read_text())

    padded = report("--parameters", "200K")
    (row,) = padded["rows"]
    assert padded["parameters"] == "200K" and row["result"]["steps"] > 0
    assert "target padded to 200K, 1 cells" in (tmp_path / "cost.md").read_text()
    # The trained target's own cell is another one.
    assert report("--report")["rows"] == []
    opened = script("setting").open_setting(work, target_minutes=0, parameters="200K")
    size = sum(one.numel() for one in opened.target.model.parameters())
    assert size == pytest.approx(200_000, rel=0.1)


def test_a_recipe_is_measured_with_its_own_options(script: Script) -> None:
    cost, setting = script("cost"), script("setting")
    osd, at_our_rate = cost.learn_config("osd"), cost.learn_config("osd-our-rate")
    assert osd.positions == ("first-rejected",) and osd.divergence == "forward-kl"
    assert (osd.steps, osd.fresh, osd.batch, osd.replay, osd.average) == (1, 8, 8, 0.0, 0.0)
    assert (osd.lr, osd.warmup_steps, osd.unroll.steps) == (1e-4, 0, setting.K)
    assert replace(at_our_rate, lr=osd.lr, warmup_steps=0) == osd
    # as many texts of warm-up as the setting, in an eighth of its steps
    assert (at_our_rate.lr, at_our_rate.warmup_steps) == (setting.LEARN.lr, 12)
    assert cost.told("osd-our-rate") == "1 per 8, `osd.yaml`, at our learning rate"


@pytest.mark.long
def test_changes_of_the_learner_are_measured_beside_it(
    script: Script, work: Path, tmp_path: Path
) -> None:
    arguments = ["--work", work, "--out", tmp_path / "changes", "--seeds", 1, "--requests", 128]
    script("run").main([str(argument) for argument in [*arguments, "--only", "changes"]])
    report = json.loads((tmp_path / "changes.json").read_text())
    replay, rate = (row["result"] for row in report["rows"])
    assert replay["requests"] == 48
    assert replay["as it is"] != replay["of the same domain first"] != replay["static"]
    assert rate["texts"] >= 24
    # the falling rate changes what the last update learns
    assert len(set(rate["alphas"].values())) == 4
    told = (tmp_path / "changes.md").read_text()
    assert "| of the same domain first | 1 |" in told and "| falling | 1 |" in told


@pytest.mark.long
def test_variants_of_the_learner_are_measured_beside_an_offline_draft(
    script: Script, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script("variants"), "JUDGED", 4)
    arguments = ["--work", work, "--out", tmp_path / "variants", "--seeds", 1, "--requests", 32]
    chosen = ["offline", "as-it-is", "muon"]
    script("run").main([str(one) for one in [*arguments, "--only", *chosen]])
    report = json.loads((tmp_path / "variants.json").read_text())
    names = [row["cell"]["name"] for row in report["rows"]]
    found = [row["result"] for row in report["rows"]]
    assert names == chosen
    assert {one["texts"] for one in found} == {found[0]["texts"]} and found[0]["texts"] >= 16
    assert min(one["learn_s"] for one in found) > 0
    assert len({one["alpha"] for one in found} | {found[0]["static"]}) == len(found) + 1
    assert "| offline | 1 | " in (tmp_path / "variants.md").read_text()


def test_shares_of_the_offline_draft_are_of_the_same_seed(script: Script) -> None:
    values = {("offline", 0): 0.5, ("offline", 1): 0.6, ("as-it-is", 1): 0.54}
    rows = [
        {
            "cell": {"part": "variants", "name": name, "seed": seed},
            "result": {"alpha": alpha, "learn_s": 60.0},
        }
        for (name, seed), alpha in values.items()
    ]
    *_, learner, offline = script("variants").variants_table(rows)
    assert learner == "| as-it-is | 1 | 0.540 | 0.900 | 60 |"
    assert offline.startswith("| offline | 2 | 0.550") and "| 1.000" in offline


def test_replay_by_domain_takes_its_texts_first(script: Script) -> None:
    def text(domain: str, token: int) -> Any:
        return SimpleNamespace(tokens=[token], records=[SimpleNamespace(request_class=domain)])

    texts = [text("code", number) for number in range(6)]
    texts += [text("prose", number) for number in range(6, 10)]
    kind = script("changes").AlikeReservoir
    reservoir = kind(16, texts=texts, latest=texts[3:], domain="prose")
    some = reservoir.sample(6, random.Random(0))
    assert len({one.tokens[0] for one in some}) == 6
    assert [one.records[0].request_class for one in some] == ["prose"] * 4 + ["code"] * 2


def test_what_is_gained_is_read_off_beside_its_cost(script: Script) -> None:
    cost = script("cost")
    dear = {
        "answers": answers("code", 0, (10, 0.6)) + answers("prose", 10, (90, 0.5)),
        "alphas": {"static": 0.3, "live": 0.5}, "training_s": 8.9, "positions": 800,
    }  # fmt: skip
    cheap = {**dear, "alphas": {"static": 0.3, "live": 0.48}, "reading_s": 1.78}
    rows = [
        {"cell": {"part": "cost", "name": name, "seed": 0}, "result": result}
        for name, result in (("8-per-8", dear), ("4-per-8", cheap))
    ]
    assert cost.learn_config("quarter-batch").batch == 2
    assert cost.told("quarter-batch") == "8 per 8, 2 texts a step"
    assert cost.relative_cost(dear) == pytest.approx(2.0)
    assert cost.training_share(dear) == pytest.approx(0.5)  # the last answer has 17.8 s of learning
    assert math.isnan(cost.reading_share(dear))  # of a cell from before passes were timed
    *_, last = cost.cost_table(rows)
    assert last == "| 4 per 8 | 1 | 2.0 | 0.50 | 0.10 | 800 | 0.500 | 0.500 | 0.180 | 0.90 | 1.00 |"


@pytest.mark.long
def test_drafts_by_class_are_served_and_told(
    script: Script, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.distill.pool import pool

    monkeypatch.setattr(pool, "FIRST_CLUSTERS", 16)
    monkeypatch.setattr(script("pools"), "JUDGED", 4)
    arguments = ["--work", work, "--out", tmp_path / "pools", "--seeds", 1, "--requests", 64]
    names = ("pools-static", "pools-single", "pools-tagged", "pools-clustered")
    script("run").main([str(argument) for argument in [*arguments, "--only", *names]])
    report = json.loads((tmp_path / "pools.json").read_text())
    static, single, tagged, clustered = (row["result"] for row in report["rows"])
    assert all(one["requests"] == 32 for one in (static, single, tagged, clustered))
    assert static["alpha_by_kind"].keys() == {"code", "prose", "headers"}
    assert single["classes"] == [] and single["alphas"].keys() == {"shared"}
    begun = {one["class"] for one in tagged["classes"] if one["decision"] == "class learns"}
    assert begun and begun <= {"code", "prose", "headers"}
    assert {f"{name}, candidate" for name in begun} <= tagged["alphas"].keys()
    assert all(one["class"].startswith("(cluster") for one in clustered["classes"])
    told = (tmp_path / "pools.md").read_text()
    assert "| static | 1 | 32 |" in told and "| by learned cluster | 1 | 32 |" in told


@pytest.mark.long
def test_a_perfect_choice_is_bounded_offline(script: Script, work: Path, tmp_path: Path) -> None:
    arguments = ["--work", work, "--out", tmp_path / "bound", "--seeds", 1, "--requests", 24]
    script("run").main([str(argument) for argument in [*arguments, "--only", "pools-bound"]])
    (row,) = json.loads((tmp_path / "bound.json").read_text())["rows"]
    alphas = row["result"]["alphas"]
    assert alphas["one"] != alphas["static"] and alphas["three"] != alphas["one"]
    assert "| three drafts, as many tokens in all | 1 | 8 |" in (tmp_path / "bound.md").read_text()


def test_what_drafts_by_class_bring_is_read_off(script: Script) -> None:
    tables = script("pool_tables")
    first = answers("code", 0, (30, 0.5)) + answers("prose", 30, (30, 0.3))
    last = answers("code", 60, (15, 0.6)) + answers("headers", 75, (15, 0.4))
    for one in [*first, *last]:
        one["draft"] = "pool/code" if one["number"] in range(70, 75) else ""
    result = {
        "answers": [*last, *first],
        "drafts": 1,
        "sorted": {"a": {"code": 40, "prose": 10}, "b": {"prose": 20, "headers": 15, "code": 5}},
    }
    assert tables.first_own(result) == 70 and tables.own_share(result) == pytest.approx(5 / 30)
    # code in a, prose and headers in b
    assert tables.match(result) == pytest.approx((40 + 20 + 15) / 90)
    rows = [{"cell": {"part": "pools", "name": "pools-tagged", "seed": 0}, "result": result}]
    *_, told = tables.pools_table(rows)
    assert told.startswith("| by tag | 1 | 90 | 0.433 | 0.500 | 0.600 | - | 0.400 |")


def test_the_worth_of_a_perfect_choice_is_read_off(script: Script) -> None:
    tables = script("pool_tables")
    same = dict.fromkeys(("code", "prose", "headers"), 0.4)
    alphas = {
        name: {**same, "code": 0.4 + 0.03 * number} for number, name in enumerate(tables.BOUNDS)
    }
    rows = [
        {
            "cell": {"part": "pools", "name": "pools-bound", "seed": 0},
            "result": {"texts": 8, "alphas": alphas},
        }
    ]
    *_, static, one, three, _, longest, whole = tables.bound_table(rows)
    assert static.endswith("| 0.400 | -0.010 |") and one.endswith(
        "| 8 x 3 | 0.430 | 0.400 | 0.400 | 0.410 | - |"
    )
    assert three.endswith("| 8 | 0.460 | 0.400 | 0.400 | 0.420 | 0.010 |")
    assert longest.endswith("| 24 | 0.520 | 0.400 | 0.400 | 0.440 | 0.030 |")
    assert whole.endswith("| 24 x 3 | 0.550 | 0.400 | 0.400 | 0.450 | 0.040 |")


@pytest.mark.long
def test_kinds_that_come_back_are_served_and_told(
    script: Script, work: Path, tmp_path: Path
) -> None:
    arguments = ["--work", work, "--out", tmp_path / "returns", "--seeds", 1, "--requests", 24]
    script("run").main([str(one) for one in [*arguments, "--only", "returning"]])
    (row,) = json.loads((tmp_path / "returns.json").read_text())["rows"]
    found = row["result"]
    assert sum(one["requests"] for one in found["windows"]) == 8 + 10 + 8 + 8
    assert found["versions"].keys() == {"1"} and found["published"] == 1
    # Nothing is published so soon: what serves is the static draft.
    assert all(one["static"] == one["served"] for one in found["windows"])
    assert "| returning | 0 | " in (tmp_path / "returns.md").read_text()


def test_what_a_return_keeps_is_read_off(script: Script) -> None:
    returns = script("returns")

    def visit(domain: str, count: int, version: int, static: float, served: float) -> list[dict]:
        text = {"domain": domain, "version": version, "positions": 10}
        return [{**text, "static": 10 * static, "served": 10 * served} for _ in range(count)]

    texts = [
        *visit("code", 120, 1, 0.5, 0.5),
        *visit("prose", 500, 2, 0.3, 0.5),
        *visit("code", 240, 2, 0.5, 0.4),
        *visit("prose", 30, 1, 0.3, 0.3),
        *visit("prose", 210, 3, 0.3, 0.45),
    ]
    result = {
        "texts": texts,
        "answers": [{"learn_s": 7.0, "serve_s": 1.0}],
        "decisions": [{"decision": "rolled back"}, {"decision": "accept"}],
        "published": 3,
        "versions": {"1": {"prose": 0.3}, "2": {"prose": 0.5}, "3": {"prose": 0.48}},
    }
    cell = {"part": "returns", "name": "returning", "seed": 1, "arguments": {"requests": 1200}}
    *_, told = returns.returns_table([{"cell": cell, "result": result}])
    visits = "0.500, 0.500 | 0.300, 0.500 | 0.500, 0.400 | 0.300, 0.431"
    # Half of 60 requests had three quarters of the gain, and the version live then has nine tenths.
    assert told == (
        f"| returning | 1 | {visits} | 0.38 | 0.90 | 0.800 | 0.800 | -0.100 | 3 | 1 | 7 |"
    )


@pytest.mark.long
def test_updates_of_known_worth_meet_the_gate(
    script: Script, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, cells, setting, measures = map(script, ("faults", "cells", "setting", "measures"))
    monkeypatch.setattr(faults, "SNAPSHOTS", 1)
    monkeypatch.setattr(faults, "PATIENCE", 24)
    opened = setting.open_setting(work, target_minutes=0)
    found = faults.run_gate(opened, cells.Cell("gate", "gate", 0, {"requests": 16}))
    assert {trial["kind"] for trial in found["trials"]} == {"update", *faults.HARMS}
    assert all(trial["decision"] == "refuse" for trial in found["trials"] if trial["kind"] == "NaN")
    # Whatever lifts an untrained draft is no harm, whatever its name.
    assert not any(
        measures.is_bad(trial) and trial["decision"] == "accept" for trial in found["trials"]
    )
    assert [one["harm"] for one in found["forced"]] == ["noise", "shuffled labels"]


def test_the_published_off_by_one_trains_behind_what_was_wrong(script: Script) -> None:
    from draftsmith.distill.buffer.traffic import ServedText

    text = ServedText(
        records=[], tokens=[5, 6, 7, 8, 9, 3], roles=np.array([0, 1, 2, 1, 3, 1], dtype=np.int8)
    )
    assert script("objectives").off_by_one(text).roles.tolist() == [0, 0, 0, 2, 0, 2]


def answers(
    domain: str, begin: int, *shares: tuple[int, float], version: int = 1
) -> list[dict[str, Any]]:
    """(count, alpha) after one another, 20 tried tokens each."""
    flat = [share for count, share in shares for _ in range(count)]
    return [
        {
            "number": begin + index, "domain": domain, "version": version, "accepted": 20 * share,
            "tried": 20, "tokens": 33,
            "passes": 17, "serve_s": 0.1 * index, "learn_s": 0.2 * index,
        }
        for index, share in enumerate(flat)
    ]  # fmt: skip


def test_figures_are_read_off_the_curves(script: Script) -> None:
    measures = script("measures")
    curve = answers("code", 0, (200, 0.6))
    curve += answers("prose", 200, (100, 0.3), (900, 0.5))
    curve += answers("code", 1200, (200, 0.54))
    result = {
        "answers": curve,
        "decisions": [],
        "compared": {"static": 0.3, "online": 0.5, "at_return": 0.51, "offline": 0.52},
    }
    rows = [{"cell": {"part": "curves", "name": "sudden", "seed": 0}, "result": result}]
    rows.append(
        {
            "cell": {"part": "baselines", "name": "baselines", "seed": 0},
            "result": {
                "answers": {
                    "static": answers("code", 0, (10, 0.6)) + answers("prose", 0, (10, 0.3))
                }
            },
        }
    )
    assert measures.gains(rows) == [pytest.approx(0.2)] and measures.shares_of_offline(rows) == [
        pytest.approx(0.5 / 0.52)
    ]
    assert measures.gains(rows, when="at_return") == [pytest.approx(0.21)]
    # Of the latest 50, so many must have 0.5 for a mean of 0.45: 38, and for 0.48: 45.
    assert measures.recoveries(rows, "sudden", "prose") == [138.0] and measures.risen(
        rows, "sudden", "prose"
    ) == [145.0]
    assert measures.returns(rows, "sudden") == [pytest.approx(0.9)]
    assert measures.expected(rows, "static", 0, curve[:400])[0] == pytest.approx(0.45)
    half = {**result, "compared": {**result["compared"], "online": 0.3}}
    rows.append(
        {"cell": {"part": "curves", "name": "sudden-half-batch", "seed": 1}, "result": half}
    )
    *_, whole, told = script("curves").compared_table(rows)
    assert whole == "| sudden | 0 | 0.210 | 0.981 | 0.200 | 0.962 | 138 | 0.900 | 2.00 |"
    assert told == "| sudden-half-batch | 1 | 0.210 | 0.981 | 0.000 | 0.577 | 138 | 0.900 | 2.00 |"
    assert measures.gains(rows) == [pytest.approx(0.2)]
    del result["compared"]["at_return"]  # of cells measured before it was compared
    assert math.isnan(measures.gains(rows, when="at_return")[0])


def test_half_a_batch_changes_nothing_else(script: Script) -> None:
    setting, cells = script("setting"), script("cells")
    half = setting.learning(cells.HALF, 1200)
    assert half.gate == setting.GATE and half.learn.batch == 4
    assert replace(half.learn, batch=setting.LEARN.batch) == setting.LEARN


def test_streams_of_other_learners_are_measured_where_they_are_named(script: Script) -> None:
    cells, setting = script("cells"), script("setting")

    def names(*only: str) -> list[str]:
        return [cell.name for cell in cells.plan(seeds=1, requests=40, only=only)]

    assert names("sudden-muon", "returning-twice-the-rate") == [
        "sudden-muon",
        "returning-twice-the-rate",
    ]
    assert "sudden" in names("curves") and "sudden-muon" not in names("curves")
    assert names("returns") == ["returning", "returning-rehearsed"]
    curve = cells.CURVES["gradual-muon"]
    assert curve == replace(cells.CURVES["gradual"], learner="muon")
    usual, other = (setting.learning(one, 40) for one in ("learning", curve.learner))
    assert other.learn == replace(usual.learn, optimizer="muon", lr=2 * usual.learn.lr)
    assert other.gate == usual.gate


def test_predictions_are_held_against_versions_that_served_one_domain(script: Script) -> None:
    measures = script("measures")
    curve = answers("prose", 0, (300, 0.4)) + answers("prose", 300, (60, 0.5), version=2)
    decisions = [
        {
            "decision": "accept",
            "version": 2,
            "alpha_candidate": 0.47,
            "alpha_logged_candidate": "nan",
        },
        # it served before the window had settled
        {"decision": "accept", "version": 1, "alpha_candidate": 0.9},
    ]
    rows = [
        {
            "cell": {"part": "curves", "name": "sudden", "seed": 0},
            "result": {"answers": curve, "decisions": decisions},
        }
    ]
    assert measures.predictions(rows, ["sudden"], "alpha_candidate") == [pytest.approx(0.03)]
    assert measures.predictions(rows, ["sudden"], "alpha_logged_candidate") == []


def test_updates_are_sorted_by_what_they_gain(script: Script) -> None:
    measures, report = script("measures"), script("report")
    trials = [
        {"kind": "noise", "gain": -0.1, "decision": "hold"},
        {"kind": "NaN", "gain": None, "decision": "refuse"},
        {"kind": "shuffled labels", "gain": -0.2, "decision": "accept"},
        {"kind": "update", "gain": 0.05, "decision": "accept"},
        {"kind": "update", "gain": 0.03, "decision": "hold"},
        {"kind": "update", "gain": 0.001, "decision": "hold"},
    ]
    rows = [
        {
            "cell": {"part": "gate", "name": "gate", "seed": 0},
            "result": {"trials": trials, "forced": []},
        }
    ]
    assert measures.shares(rows, measures.is_bad, False) == [pytest.approx(2 / 3)]
    assert measures.shares(rows, measures.is_good, False) == [pytest.approx(1 / 2)]
    told = report.tables({"rows": rows})
    assert "| injected bad updates blocked | 1 | 0.667 | 1 | missed |" in told
    assert "| NaN | not finite | 1 | 0 |" in told


def test_streams_shift_as_they_are_named(script: Script) -> None:
    streams = script("streams")
    first, *_, last = np.array_split([name == "b" for name in streams.gradual("a", "b", 4000)], 8)
    assert first.mean() < 0.12 and last.mean() > 0.88
    assert streams.turns(("a", "b"), 2, 2) == ["a", "a", "b", "b"] * 2
    mixed = streams.mixed(("a", "b", "c"), 600)
    assert all(150 < mixed.count(name) < 250 for name in "abc") and len(set(mixed[:9])) == 3


def test_a_day_is_lived_through_window_by_window(
    script: Script, work: Path, tmp_path: Path
) -> None:
    day = script("day")
    arguments = ["--work", work, "--out", tmp_path / "day", "--busiest", 16, "--windows", 3]
    day.main([str(argument) for argument in arguments])
    report = json.loads((tmp_path / "day.json").read_text())
    assert len(report["windows"]) == 3 and report["requests"] == sum(
        one["requests"] for one in report["windows"]
    )
    # Nothing is learned from so few requests: both drafts are the same one, scored at the same
    # positions.
    assert report["windows"][0]["gain"] == 0.0 and report["windows"][0]["resident_mib"] > 50
    assert (
        "| windows below the static draft" in (tmp_path / "day.md").read_text()
        and (tmp_path / "day.png").exists()
    )


def test_memory_that_grows_is_told_from_memory_that_is_flat(script: Script) -> None:
    day = script("day")
    noise = torch.randn(60, generator=torch.Generator().manual_seed(0))
    flat = day.slope_a_window((500 + noise).tolist())
    growing = day.slope_a_window((500 + noise + 0.8 * torch.arange(60)).tolist())
    assert abs(flat.mean) < flat.half and growing.mean - growing.half > 0
