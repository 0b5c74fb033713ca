"""The tests marked `gpu`, and which of them failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from draftsmith.files import write_json
from scripts.bench.device.shapes import stage_parser
from scripts.paths import ROOT

ONE_FILE = "tests/unit/kernels/divergence/test_divergence_gpu.py"


def main(arguments: list[str] | None = None) -> int:
    options = stage_parser("tests", __doc__).parse_args(arguments)
    xml = Path(options.out).resolve().with_suffix(".xml")
    xml.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={xml}"]
    status = subprocess.run(
        [*command, ONE_FILE if options.dry_run else "tests"], cwd=ROOT
    ).returncode
    write_json(options.out, {"schema": 1, "status": status, **counts(xml)})
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
