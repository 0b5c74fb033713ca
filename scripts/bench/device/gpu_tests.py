"""The tests marked `gpu`, and which of them failed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from draftsmith.files import write_json
from scripts.bench.device.shapes import stage_parser
from scripts.paths import ROOT

ONE_FILE = "tests/unit/kernels/divergence/test_divergence_gpu.py"


def main(arguments: list[str] | None = None) -> int:
    options = stage_parser("tests", __doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={xml}"]
        status = subprocess.run(
            [*command, ONE_FILE if options.dry_run else "tests"], cwd=ROOT
        ).returncode
        report = counts(xml)
    write_json(options.out, {"schema": 1, "status": status, **report})
    return status


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


if __name__ == "__main__":
    sys.exit(main())
