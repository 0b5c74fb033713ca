"""The manifests of deploy/kubernetes by the schemas of Kubernetes itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

FOLDER = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
CHECK = """
import sys, yaml, kubernetes_validate
for path in sys.argv[1:]:
    for one in yaml.safe_load_all(open(path)):
        kubernetes_validate.validate(one, "1.34", strict=True)
"""


def validate(*paths: Path) -> subprocess.CompletedProcess[str]:
    assert "DRAFTSMITH_CLIENTS" in os.environ, (
        "DRAFTSMITH_CLIENTS names no folder with kubernetes-validate; run scripts/test --all"
    )
    python = Path(os.environ["DRAFTSMITH_CLIENTS"]) / "kubernetes/bin/python"
    command = [str(python), "-c", CHECK, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_manifests_are_valid() -> None:
    found = validate(*(one for one in FOLDER.glob("*.yaml") if one.stem != "kustomization"))
    assert found.returncode == 0, found.stderr


def test_a_wrong_field_is_refused(tmp_path: Path) -> None:
    wrong = (FOLDER / "engine.yaml").read_text().replace("volumeMounts:", "volumeMount:")
    (tmp_path / "engine.yaml").write_text(wrong)
    found = validate(tmp_path / "engine.yaml")
    assert found.returncode != 0 and "volumeMount" in found.stderr
