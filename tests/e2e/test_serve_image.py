"""The image of `draftsmith serve`, built and started where a Docker daemon answers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
# A registry may be slow.
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def test_the_image_serves_a_folder_and_ends_by_a_signal(
    launch: Callable[..., Any], tiny_target: Callable[..., str]
) -> None:
    if not shutil.which("docker") or subprocess.run(["docker", "info"]).returncode != 0:
        pytest.skip("no Docker daemon answers `docker info`")
    build = ["docker", "build", "-f", "deploy/serve.Dockerfile", "-t", "draftsmith-serve-test"]
    subprocess.run([*build, "--build-arg", "PIP_EXTRA_INDEX_URL", "."], cwd=ROOT, check=True)
    run = ["docker", "run", "--rm", "--network", "host", "-v", f"{tiny_target('llama')}:/t:ro"]
    server = launch([*run, "draftsmith-serve-test", "--target", "/t", "--name", "tiny", "--suffix"])
    body = {"prompt": [5, 6, 7, 5, 6], "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 8
    # `launch` ends it by SIGTERM, which has to give status 0.
