"""The kernel audit: it passes on our kernels and sees every planted mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftsmith.cli import main
from draftsmith.serve import audit_kernels
from draftsmith.serve.audit_config import AuditConfig
from draftsmith.serve.audit_kernels import LAWS, controls, enumeration_error, joint_fit
from draftsmith.serve.audit_process import Law, MarkovPair, Procedure, cells, generate, joint_law
from draftsmith.serve.audit_report import Check, Report

CPU = torch.device("cpu")
QUICK = AuditConfig(kernels=True, rounds=60_000)


def test_joint_law_is_the_product_of_its_steps() -> None:
    pair = Law(name="any").pair(vocab_size=3, seed=0, device=CPU)
    probs = pair.p_logits.double().softmax(-1)
    joint = joint_law(pair.p_logits, 3).view(3, 3, 3)
    assert joint.sum().item() == pytest.approx(1)
    for tokens in [(0, 0, 0), (1, 2, 0), (2, 1, 2)]:
        a, b, c = tokens
        assert joint[tokens].item() == pytest.approx((probs[0, a] * probs[0 * 3 + a, b] * probs[a * 3 + b, c]).item())
        assert joint.flatten()[cells(torch.tensor([tokens]), 3)].item() == joint[tokens].item()


def test_generations_use_every_depth_and_do_not_depend_on_the_batch() -> None:
    law = LAWS[0]
    pair = law.pair(vocab_size=5, seed=1, device=CPU)
    seeds = torch.arange(60)
    whole = generate(pair, law, Procedure(), seeds=seeds, length=6, depth=3)
    assert 60 * 6 / 4 < whole.num_rounds < 60 * 6, "some rounds keep drafts, some do not"
    assert whole.tokens.shape == (60, 6) and whole.tokens.max() == 4


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_joint_laws_hold(law: Law) -> None:
    assert joint_fit(law, Procedure(), QUICK, device=CPU).p_value > 1e-4


# Rounding q to bfloat16 is the smallest of the mistakes: see the long lane.
@pytest.mark.parametrize("name", [name for name in controls() if name != "q told in bfloat16"])
def test_mistakes_are_caught(name: str) -> None:
    assert joint_fit(LAWS[0], controls()[name], QUICK, device=CPU, offset=24.0).p_value < 1e-9


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_whole_audit_at_its_default_size() -> None:
    report = audit_kernels.audit_kernels(AuditConfig(kernels=True))
    assert report.verdict == "lossless", report.lines()


@pytest.mark.parametrize("deterministic", [False, True])
def test_enumeration_is_exact_and_sees_a_wrong_law(deterministic: bool) -> None:
    pair = Law(name="any", top_k=3).pair(vocab_size=4, seed=3, device=CPU)
    assert enumeration_error(pair, depth=2, deterministic=deterministic) < 1e-12
    wrong = enumeration_error(pair, depth=2, deterministic=deterministic, residual=lambda p, q: p)
    assert wrong > 1e-3


def test_enumeration_needs_the_target_at_every_depth() -> None:
    """A pair whose draft is the target keeps everything; swapping the two is seen only through the laws it leaves."""
    pair = Law(name="any").pair(vocab_size=3, seed=4, device=CPU)
    same = MarkovPair(pair.p_logits, pair.p_logits)
    assert enumeration_error(same, depth=3) < 1e-12


def passed(name: str, kind: str, good: bool) -> Check:
    return Check(name=name, kind=kind, passed=good, said="")


@pytest.mark.parametrize(
    "checks, verdict",
    [
        ([passed("a", "law", True), passed("c", "control", True)], "lossless"),
        ([passed("a", "law", False), passed("c", "control", True)], "lossy"),
        ([passed("a", "law", True), passed("c", "control", False)], "powerless"),
        ([passed("a", "law", False), passed("c", "control", False)], "lossy"),
        ([], "powerless"),
    ],
)
def test_verdicts(checks: list[Check], verdict: str) -> None:
    assert Report("x", 1e-9, checks).verdict == verdict


def test_command_writes_the_report_and_exits_by_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ("residual dropped", "bonus off by one")
    full = controls()
    monkeypatch.setattr(audit_kernels, "controls", lambda: {name: full[name] for name in kept})
    out = tmp_path / "report.json"
    assert main(["audit", "--kernels", "--rounds", "20000", "--out", str(out)]) == 0
    assert "LOSSLESS" in capsys.readouterr().out
    (report,) = json.loads(out.read_text())
    assert report["verdict"] == "lossless" and len(report["checks"]) == 5 + len(LAWS) + len(kept)

    # A kernel that drops the residual: the same command must fail.
    monkeypatch.setattr(audit_kernels, "Procedure", lambda: full["residual dropped"])
    monkeypatch.setattr(audit_kernels, "controls", lambda: {"bonus off by one": full["bonus off by one"]})
    assert main(["audit", "--kernels", "--rounds", "20000"]) == 1
    assert "LOSSY: joint law" in capsys.readouterr().out


def test_triton_where_it_cannot_run_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main(["audit", "--kernels", "--impl", "triton"]) == 2
    assert "'triton' cannot run on cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give --kernels, or --url"),
        (["--kernels", "--false-alarm", "2"], "false_alarm is 2.0"),
        (["--url", "http://127.0.0.1:9", "--length", "2"], "length is 2"),
        (["--url", "http://127.0.0.1:9", "--samples", "10"], "samples is 10"),
        (["--url", "http://127.0.0.1:9"], "check the URL"),
        (["--kernels", "--rounds", "0"], "rounds is 0"),
        (["--kernels", "--device", "tpu"], "device 'tpu'"),
        (["--kernels", "--impl", "cuda"], "must be one of auto, triton, torch"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
