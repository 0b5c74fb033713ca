"""The tests marked `gpu`, and which of them failed. Most of their time is the compiler's, so that
several processes share the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from scripts.bench.device.report import Report
from scripts.paths import ROOT

MOST_PROCESSES = 12
ONE_FILE = "tests/unit/kernels/divergence/test_divergence_gpu.py"


def run(report: Report, item: str, out: Path, tiny: bool) -> None:
    if not (ROOT / "tests").is_dir():
        report.note(item, left_out="the tests have not travelled")
        return
    xml = out / "tests.xml"
    xml.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={xml.resolve()}"]
    processes = [] if tiny else ["-n", str(min(MOST_PROCESSES, os.cpu_count() or 1))]
    files = [ONE_FILE] if tiny else files_with_mark(ROOT / "tests")
    with subprocess.Popen([*command, *processes, *files], cwd=ROOT) as tests:
        try:
            status = tests.wait()
        except BaseException:
            tests.kill()
            raise
    report.note(item, status=status, **counts(xml))


def files_with_mark(folder: Path) -> list[str]:
    """Files that hold such tests: collecting all others takes longer than many of these."""
    files = sorted(folder.rglob("test_*.py"))
    return [str(file) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


def counts(xml: Path) -> dict[str, object]:
    cases = list(ElementTree.parse(xml).iter("testcase"))
    broken = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(broken) - skipped,
        "skipped": skipped,
        "failed_tests": broken,
    }
