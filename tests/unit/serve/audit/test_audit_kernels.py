"""The audit of this machine's kernels: it passes on ours and sees what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.cli import main
from draftsmith.kernels.statistics import Fit
from draftsmith.kernels.verify.verdict import TreeVerdict, Verdict
from draftsmith.serve.audit import kernels
from draftsmith.serve.audit.kernels import KERNELS, VOCAB_SIZE, Case, Kernel, cases, reference_check
from draftsmith.serve.audit.report import Check, Report
from tests.goodness import g_test

CPU = torch.device("cpu")
AUDIT = ("audit", "--kernels")


def test_every_kernel_gets_a_verdict_and_every_control_is_caught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    assert main([*AUDIT, "--out", str(out)]) == 0
    assert "LOSSLESS" in capsys.readouterr().out
    (report,) = json.loads(out.read_text())
    names = {check["name"] for check in report["checks"]}
    assert report["verdict"] == "lossless"
    assert {
        f"{one} decides as the reference, true q" for one in ("chain", "block", "tree")
    } <= names
    assert sum(check["kind"] == "control" for check in report["checks"]) == len(KERNELS)


def with_less_of_q(kernel: Kernel) -> Kernel:
    """A kernel that reads flattened logits of the draft; its reference reads them as they are."""

    def verify(q_logits: torch.Tensor | None, **given: Any) -> Verdict | TreeVerdict:
        if q_logits is not None and q_logits.dtype == torch.float32:
            q_logits = q_logits * 0.5
        return kernel.verify(q_logits=q_logits, **given)

    return kernel._replace(verify=verify)


def test_a_kernel_that_reads_another_q_is_lossy_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = 1
    others = [kernel for at, kernel in enumerate(KERNELS) if at != broken]
    monkeypatch.setattr(kernels, "KERNELS", (with_less_of_q(KERNELS[broken]), *others))
    assert main([*AUDIT]) == 1
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "LOSSY:" in one]
    named = line.partition("LOSSY: ")[2].split(", ")
    assert f"LOSSY: {KERNELS[broken].name} decides as the reference, true q" in line
    assert not {kernel.name for kernel in others} & {name.split()[0] for name in named}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_that_decides_otherwise_in_float32_is_seen(kernel: Kernel) -> None:
    (case, *_) = cases(CPU)
    assert reference_check(kernel, case, "torch").passed
    check = reference_check(with_less_of_q(kernel), case, "torch")
    assert not check.passed and check.evidence["differing"] > 100


def fit_of(kernel: Kernel, case: Case, warmth: float = 1.0) -> Fit:
    """All tokens of 20,000 rounds together, those left open filled up by the target, whose
    distribution is the same behind every text. The draft's logits are reported `warmth` times."""
    seeds, p = torch.arange(20_000), case.p_logits.double().softmax(-1)
    draws = torch.Generator().manual_seed(1)
    given = kernel.arguments(case, seeds, draws)
    q = given["q_logits"]
    verdict = kernel.verify(**given | {"q_logits": None if q is None else q * warmth}, impl="torch")
    filled = torch.multinomial(p, 3 * len(seeds), True, generator=draws)
    emitted = torch.arange(3) <= verdict.accepted[:, None]
    tokens = torch.where(emitted, verdict.tokens[:, :3], filled.view(-1, 3))
    cells = (tokens * VOCAB_SIZE ** torch.arange(3)).sum(dim=1)
    joint = torch.einsum("i,j,k->ijk", p, p, p).flatten()
    return g_test(torch.bincount(cells, minlength=len(joint)), joint)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_texts_of_real_noise_follow_the_target(kernel: Kernel) -> None:
    """The audit's cases; a q reported at another temperature is seen."""
    given = [case for case in cases(CPU) if case.q_logits is not None or not kernel.needs_q]
    assert all(fit_of(kernel, case).p_value > 1e-6 for case in given) and len(given) > 1
    assert fit_of(kernel, given[0], warmth=0.5).p_value < 1e-9


@pytest.mark.parametrize(
    "impl, device, said",
    [
        ("torch", "cpu", "were not: audit with"),
        ("triton", "cpu", "ran interpreted"),
        ("triton", "cuda", "were audited"),
    ],
)
def test_the_report_says_what_of_triton_was_audited(impl: str, device: str, said: str) -> None:
    assert said in kernels.note(impl, torch.device(device))


# Verdicts and the command


def passed(name: str, kind: str, good: bool) -> Check:
    return Check(name=name, kind=kind, passed=good, said="")


@pytest.mark.parametrize(
    "checks, verdict",
    [
        ([passed("a", "check", True), passed("c", "control", True)], "lossless"),
        ([passed("a", "check", False), passed("c", "control", True)], "lossy"),
        ([passed("a", "check", True), passed("c", "control", False)], "powerless"),
        ([passed("a", "check", False), passed("c", "control", False)], "lossy"),
        ([], "powerless"),
    ],
)
def test_verdicts(checks: list[Check], verdict: str) -> None:
    assert Report("x", 1e-9, checks).verdict == verdict


def test_triton_where_it_cannot_run_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main(["audit", "--kernels", "--impl", "triton"]) == 2
    assert "'triton' cannot run on cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give --kernels, or --url"),
        (["--kernels", "--false-alarm", "2"], "'false_alarm' is 2.0"),
        (["--url", "http://127.0.0.1:9", "--length", "0"], "'length' is 0"),
        (["--url", "http://127.0.0.1:9", "--samples", "0"], "'samples' is 0"),
        (["--url", "http://127.0.0.1:9", "--k", "-1"], "'k' is -1"),
        (["--url", "http://127.0.0.1:9", "--bias", "1"], "'bias' is 1.0"),
        (["--url", "http://127.0.0.1:9", "--temperature", "-1"], "'temperature' is -1.0"),
        (["--kernels", "--compare-url", "http://127.0.0.1:9"], "give --url, too"),
        (["--url", "http://127.0.0.1:9"], "check the URL"),
        (["--kernels", "--device", "tpu"], "device 'tpu'"),
        (["--kernels", "--buffer", "tests"], "'tests' holds no records or is not there"),
        (["--kernels", "--impl", "cuda"], "must be one of auto, triton, torch"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
