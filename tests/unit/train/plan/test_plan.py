"""`draftsmith plan`: the arithmetic against known rounds, what is expected of a draft, and the
whole command on a tiny target."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.cli import main
from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import OPTIONS, DraftLmOptions, Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from draftsmith.kernels.acceptance import expected_rounds
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.measured import measure
from draftsmith.train.evaluate.teacher_forced import evaluate_draft
from draftsmith.train.plan import make, timing
from draftsmith.train.plan.candidates import Candidate, candidates, coverage_of, reduced_vocabulary
from draftsmith.train.plan.config import PlanConfig
from draftsmith.train.plan.costs import DISTRIBUTION_BYTES, cost_of, data_of
from draftsmith.train.plan.expected import PUBLISHED, published, recorded, stated, trained_shape
from draftsmith.train.plan.forecast import Spread, alpha_of, best, between, forecast, tau_of
from draftsmith.train.plan.timing import round_cost, time_rounds

EVALUATION = {
    "temperature": 1.0,
    "tokens": 900,
    "alpha": [
        {"value": 0.8, "low": 0.7, "high": 0.9},
        {"value": 0.5, "low": 0.4, "high": 0.6},
        None,
    ],
}


def test_tau_of_a_constant_alpha_is_that_of_long_texts() -> None:
    """The same quantity as the project's own definition, n / E[rounds], at its limit: a last round
    may overshoot."""
    keep = torch.full((4000, 3), 0.6)
    assert tau_of([0.6], 3) == pytest.approx(4000 / expected_rounds(keep), rel=1e-3)
    assert tau_of([0.9, 0.5], 3) == pytest.approx(1 + 0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.5)
    assert tau_of([1.0], 5) == 6 and tau_of([0.0], 5) == 1


@given(st.floats(0.0, 1.0), st.integers(1, 15))
def test_alpha_and_tau_are_inverse(alpha: float, k: int) -> None:
    assert alpha_of(tau_of([alpha], k), k) == pytest.approx(alpha, abs=1e-9)


@given(st.floats(1.0, 8.0), st.floats(0.5, 4.0), st.floats(0.0, 0.5))
def test_a_speed_up_is_one_exactly_where_it_breaks_even(
    tau: float, cost: float, doubt: float
) -> None:
    one = forecast(3, Spread(cost, cost * (1 - doubt), cost * (1 + doubt)), Spread(tau, tau, tau))
    assert (one.speedup.value >= 1) == (tau >= one.break_even) or math.isclose(tau, cost)
    assert one.speedup.low <= one.speedup.value <= one.speedup.high


def test_the_best_length_pays_most() -> None:
    costs = {1: 1.1, 2: 1.2, 3: 1.3, 4: 2.5}
    found = [
        forecast(k, Spread(cost, cost, cost), Spread(*[tau_of([0.7], k)] * 3))
        for k, cost in costs.items()
    ]
    assert best(found).k == 3
    assert between({1: 10.0, 4: 40.0}, 2) == pytest.approx(20.0)


def test_costs_of_rounds_come_from_the_fast_turns() -> None:
    """Turns that others slowed down, each in its own way, leave no trace."""
    cost = round_cost([1.0, 1.0, 1.0, 9.0], {1: [1.2, 8.0, 1.2, 1.2]}, {1: [0.5, 0.5, 7.0, 0.5]}, 1)
    assert cost == pytest.approx((1.7, 1.7, 1.7))


def test_what_is_expected_of_a_draft() -> None:
    (given_alpha,) = stated(["eagle3:0.75,0.7"], list(OPTIONS)).values()
    assert given_alpha.tau(2) == Spread(*[1 + 0.75 + 0.75 * 0.7] * 3)
    assert given_alpha.tau(1, coverage=0.8).value == pytest.approx(1 + 0.75 * 0.8)
    for words in ("eagle3", "eagle3:x", "eagle3:1.5", "eagle9:0.5"):
        with pytest.raises(UserError, match="FAMILY:ALPHA"):
            stated([words], list(OPTIONS))
    known = recorded({"evaluation": [EVALUATION]}, 1.0, "draft")
    assert known.tau(2) == pytest.approx((1 + 0.8 + 0.4, 1 + 0.7 + 0.28, 1 + 0.9 + 0.54))
    with pytest.raises(UserError, match="eval --store"):
        recorded({"evaluation": [EVALUATION]}, 0.0, "draft")
    greedy = EVALUATION | {"draft_sampling": "greedy", "alpha": EVALUATION["alpha"][:1]}
    both = {"evaluation": [EVALUATION, greedy]}
    found = [recorded(both, 1.0, "d", draft_sampling=one) for one in ("sampled", "greedy")]
    assert [len(one.middle) for one in found] == [2, 1]
    assert "with greedy drafts" in found[1].source
    with pytest.raises(UserError, match="--draft-sampling greedy"):
        recorded({"evaluation": [EVALUATION]}, 1.0, "d", draft_sampling="greedy")
    for family, (k, least, greatest, _) in PUBLISHED.items():
        expectation = published(family)
        assert expectation is not None
        tau = expectation.tau(k)
        assert (tau.low, tau.high) == pytest.approx(
            (least, greatest), abs=1e-6
        ) and tau.low < tau.value < tau.high
    assert published("medusa") is None
    record = {
        "family": "draft-lm",
        "training": {"config": {"draft_lm": {"num_layers": 3, "lora": None}}},
    }
    assert (
        trained_shape(record) == DraftLmOptions(num_layers=3)
        and trained_shape({"family": "mtp"}) == OPTIONS["mtp"]()
    )


def test_a_vocabulary_is_reduced_where_the_text_allows_it() -> None:
    counts = torch.zeros(4096, dtype=torch.int64)
    counts[100:700] = 10
    counts[3000:3010] = 1
    assert reduced_vocabulary(counts) == 768 and coverage_of(counts, 768) == 1.0
    assert coverage_of(counts, 600) == pytest.approx(6000 / 6010)
    assert reduced_vocabulary(torch.ones(4096, dtype=torch.int64)) is None
    names = [
        one.name
        for one in candidates(PlanConfig(target="t"), {}, num_layers=8, token_counts=counts)
    ]
    assert (
        "eagle3 draft_vocab_size=768" in names
        and "draft-lm target_layers=[0,7]" in names
        and set(OPTIONS) <= set(names)
    )
    asked = PlanConfig(
        target="t", families=("eagle3",), eagle3=Eagle3Options(taps=(1, 3), fc_norm=True)
    )
    (one,) = candidates(asked, {}, num_layers=8, token_counts=counts)
    assert one.overrides == ["eagle3.taps=[1,3]", "eagle3.fc_norm=True"]
    with pytest.raises(UserError, match="--families names 'eagle9'"):
        candidates(
            PlanConfig(target="t", families=("eagle9",)), {}, num_layers=8, token_counts=None
        )


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TURNS", 2)
    monkeypatch.setattr(timing, "TURN_S", 0.0)


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"), dtype=torch.float32)


def test_costs_are_bytes_that_can_be_counted(target: Target, fast: None) -> None:
    drafter = FAMILIES["eagle3"].create(Eagle3Options(taps=(1, 2, 3)), target, seed=0)
    cost = cost_of(target, drafter, tokens=1000, epochs=2.0)
    parameters = sum(
        parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad
    )
    assert (
        cost.parameters == parameters and cost.run_bytes == cost.draft_bytes + 2 * 12 * parameters
    )
    assert cost.taps_bytes == 1000 * 3 * 32 * 2
    assert cost.train_hours == pytest.approx(2000 / cost.train_tokens_per_s / 3600)
    assert cost.train_memory_bytes > 16 * parameters
    assert not any(parameter.grad is not None for parameter in drafter.parameters())
    assert (
        data_of(10, 5.0).distributions_bytes == 10 * DISTRIBUTION_BYTES
        and data_of(3600, 1.0).generate_hours == 1.0
    )


def test_drafts_end_where_the_family_does(target: Target, fast: None) -> None:
    drafter = FAMILIES["medusa"].create(OPTIONS["medusa"](), target, seed=0).eval()
    times = time_rounds(target, drafter, rows=2, k=8, context=64)
    assert sorted(times.cost) == [1, 2, 3, 4] and all(cost.low > 0 for cost in times.cost.values())


@pytest.fixture
def trained_mtp(target: Target, tmp_path: Path) -> Path:
    folder = tmp_path / "mtp"
    checkpoint.save(FAMILIES["mtp"].create(OPTIONS["mtp"](), target, seed=0), folder, target)
    write_json(
        folder / "draftsmith.json",
        read_json(folder / "draftsmith.json") | {"evaluation": [EVALUATION]},
    )
    return folder


def command(target: Target, draft: Path) -> list[str]:
    return [
        "plan",
        "--target",
        target.name,
        "--k",
        "4",
        "--streams",
        "1",
        "2",
        "--context",
        "32",
        "--draft",
        str(draft),
    ]


@pytest.mark.long
def test_every_family_is_planned_for(
    target: Target,
    trained_mtp: Path,
    fast: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A second a draft.
    monkeypatch.setattr(make, "capture_forwards", lambda target, drafter: None)
    capsys.readouterr()
    assert main([*command(target, trained_mtp), "--alpha", "draft-lm:1.0", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {draft["family"] for draft in plan["drafts"]} == set(OPTIONS) and plan["refused"] == {}
    assert plan["data"]["tokens"] == 50000 * 512 and plan["data"]["generate_hours"] > 0
    by_family = {draft["family"]: draft for draft in plan["drafts"]}
    assert "measured on 900 tokens" in by_family["mtp"]["expected_from"]
    assert (
        by_family["medusa"]["expected_from"] is None
        and by_family["medusa"]["streams"]["1"]["forecasts"] == []
    )
    sure = by_family["draft-lm"]["streams"]["2"]["forecasts"]
    assert [one["tau"]["value"] for one in sure] == [2.0, 3.0, 4.0, 5.0]
    for one in sure:
        assert one["speedup"]["value"] == pytest.approx(one["tau"]["value"] / one["break_even"])


@pytest.mark.long
def test_several_drafts_of_a_family_are_planned_each_at_every_k(
    target: Target, tmp_path: Path, fast: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for layers, alpha in ((1, 0.4), (2, 0.9)):
        options = DraftLmOptions(num_layers=layers, hidden_size=32)
        folder = tmp_path / f"layers-{layers}"
        checkpoint.save(FAMILIES["draft-lm"].create(options, target, seed=0), folder, target)
        record = read_json(folder / "draftsmith.json")
        found = {"value": alpha, "low": alpha, "high": alpha}
        record["evaluation"] = [EVALUATION | {"alpha": [found]}]
        record["training"] = {
            "config": {"draft_lm": {"num_layers": layers, "hidden_size": 32}}, "data": {}
        }  # fmt: skip
        write_json(folder / "draftsmith.json", record)
        folders.append(str(folder))
    command = ["plan", "--target", target.name, "--k", "3", "--streams", "1", "--context", "32"]
    command += ["--families", "draft-lm", "--draft", *folders]
    assert main([*command, "--json"]) == 0
    drafts = json.loads(capsys.readouterr().out)["drafts"]
    assert [one["draft"] for one in drafts] == folders
    assert drafts[0]["cost"]["parameters"] < drafts[1]["cost"]["parameters"]
    for one, alpha in zip(drafts, (0.4, 0.9)):
        forecasts = one["streams"]["1"]["forecasts"]
        assert [each["k"] for each in forecasts] == [1, 2, 3]
        assert forecasts[1]["tau"]["value"] == pytest.approx(1 + alpha + alpha**2)
    assert main(command) == 0
    text = capsys.readouterr().out
    lines = text.split("speed-up by k:")[1].splitlines()[1:3]
    assert all(folder in line and "3: " in line for folder, line in zip(folders, lines))


@pytest.mark.long
def test_trees_of_measured_shapes_are_planned(
    target: Target, trained_mtp: Path, fast: None, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read_json(trained_mtp / "draftsmith.json")
    tau = {"value": 2.5, "low": 2.0, "high": 3.0}
    shapes = ("dynamic:nodes=8,depth=3,width=3", "sampled:3x2")
    record["evaluation"][0]["trees"] = [{"tree": tree, "tau": tau} for tree in shapes]
    write_json(trained_mtp / "draftsmith.json", record)
    flags = [*command(target, trained_mtp), "--families", "mtp"]
    assert main([*flags, "--json"]) == 0
    (draft,) = json.loads(capsys.readouterr().out)["drafts"]
    for streams in ("1", "2"):
        found = draft["streams"][streams]["trees"]
        assert [(one["tree"], one["k"]) for one in found] == list(zip(shapes, (8, 9)))
        for one in found:
            assert one["tau"] == tau and one["break_even"] > 1
            assert one["speedup"]["value"] == pytest.approx(2.5 / one["break_even"])
            assert one["tokens_per_s"] > 0
    assert main(flags) == 0
    lines = capsys.readouterr().out.split("draft trees by shape:")[1].splitlines()[1:4]
    assert "chain, k = " in lines[0]
    for shape, line in zip(shapes, lines[1:]):
        assert f"{shape}: tau 2.50 (2.00-3.00), needs" in line and line.endswith(" tok/s")


def test_the_plan_as_text(
    target: Target, trained_mtp: Path, fast: None, capsys: pytest.CaptureFixture[str]
) -> None:
    # Before the flags, of which some take all words that follow.
    _, *flags = command(target, trained_mtp)
    assert main(["plan", "eagle3.taps=[1]", *flags, "--families", "mtp", "eagle3"]) == 0
    text = capsys.readouterr().out
    assert "1 stream, a plain round" in text and "2 streams" in text and "eagle3 taps=[1]" in text
    assert "h to generate" in text and "measured on 900 tokens" in text


def test_bad_input_is_one_sentence(
    tiny_target: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--target", tiny_target("llama"), "--k", "0"]) == 2
    assert "option 'k' is 0" in capsys.readouterr().err
    assert main(["plan", "--target", tiny_target("llama"), "--draft", str(tmp_path)]) == 2
    assert "draft record" in capsys.readouterr().err
    assert Candidate("mtp", OPTIONS["mtp"]()).name == "mtp"


@pytest.mark.long
def test_the_tau_that_is_planned_with_is_the_tau_of_real_rounds(
    tiny_target: Callable[..., str],
) -> None:
    """Of the target drafting for itself with noise on its weights: planned from its record on some
    texts, measured on others. The bounds are the plan's own. Its speed-up is not held against a
    clock here: it leaves out what an engine adds to a round, which is most of it at this size."""
    torch.set_num_threads(1)
    target = Target.load(tiny_target("llama"), dtype="float32")
    planned, measured = [], []
    for noise in (0.01, 0.1):
        draft = noisy(target, noise)
        texts = [
            spoken_by(target, prompt, number)
            for number, prompt in enumerate(prompts_of(32, seed=0))
        ]
        record = {
            "evaluation": [evaluate_draft(draft, target, texts, temperature=1.0, k=4).to_dict()]
        }
        planned.append(recorded(record, 1.0, "D").tau(4))
        others = [spoken_by(target, prompt, 0, tokens=1) for prompt in prompts_of(32, seed=1)]
        rounds = measure(draft, target, others, k=4, max_new_tokens=96, batch_size=16)
        measured.append(
            next(
                one.measured.tau for one in rounds.measurements if one.predicted.temperature == 1.0
            )
        )
    for plan, real in zip(planned, measured, strict=True):
        assert plan.low <= real.high and real.low <= plan.high
    # Negative control: another draft's record is told apart.
    assert planned[1].high < measured[0].low


def noisy(target: Target, scale: float) -> torch.nn.Module:
    draft = FAMILIES["draft-lm"].create(DraftLmOptions(init=target.name), target, seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim > 1:
                parameter.add_(scale * parameter.std() * torch.randn_like(parameter))
    return draft.eval()


def prompts_of(count: int, *, seed: int) -> list[list[int]]:
    return torch.randint(3, 288, (count, 6), generator=torch.Generator().manual_seed(seed)).tolist()


def spoken_by(target: Target, prompt: list[int], number: int, *, tokens: int = 96) -> TokenSequence:
    (answer,) = target.answer([prompt], max_new_tokens=tokens, temperature=1.0, seeds=[number])
    ids = torch.tensor(prompt + answer)
    return TokenSequence(f"text {prompt}", ids, torch.arange(len(ids)) >= len(prompt))
