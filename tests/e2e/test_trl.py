"""TRL's own GRPO trainer with the callback: revisions, and rollouts as the learner reads them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.distill.buffer.traffic import OpenRequests
from draftsmith.distill.learn.text_states import TargetFolder

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
PROBE = Path(__file__).with_name("trl_probe.py")


@pytest.fixture
def trl() -> Path:
    """Folder of packages that holds TRL alone; all else is the environment's."""
    folder = Path(os.environ.get("DRAFTSMITH_CLIENTS", ".venv-clients"), "trl", "lib")
    found = list(folder.glob("python*/site-packages/trl"))
    if not found:
        pytest.skip(f"TRL is not installed below {folder}; scripts/test --all installs it")
    return found[0].parent


def test_grpo_writes_revisions_and_its_rollouts_are_records(
    trl: Path, tmp_path: Path, tiny_target: Callable[..., str]
) -> None:
    # Behind this environment's own packages, whose pins TRL must not change.
    paths = [*sys.path, str(trl)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    subprocess.run(
        [sys.executable, str(PROBE), tiny_target("llama"), str(tmp_path)],
        env=environment, check=True, timeout=1100,
    )  # fmt: skip
    source = TargetFolder(str(tmp_path / "policy" / "current"))
    assert (Path(source.folder).name, source.weight_version) == ("step-000003", "3")
    first, *_, last = sorted((tmp_path / "policy").glob("step-*"))
    assert first.name == "step-000000"
    trained = load_file(tmp_path / "last" / "model.safetensors")
    written = load_file(last / "model.safetensors")
    begun = load_file(first / "model.safetensors")
    assert all(torch.equal(value, trained[name]) for name, value in written.items())
    assert any(not torch.equal(value, begun[name]) for name, value in written.items())
    read = OpenRequests(BufferReader(str(tmp_path / "buffer")).read(max_records=1 << 20).records)
    texts = read.take(idle_s=1e9)
    versions = [text.records[0].weight_version for text in texts]
    assert {name: versions.count(name) for name in sorted(set(versions))} == {
        "0": 4, "1": 4, "2": 4,
    }  # fmt: skip
    assert all(text.is_scorable for text in texts)
    assert {text.records[0].temperature for text in texts} == {0.75}
