"""Drafts swapped inside a running, unmodified vLLM on the CPU: identical greedy tokens, the
acceptance of the version that is served, and no version that ends the engine.

`DRAFTSMITH_VLLM_PYTHON` names the Python of vLLM's own environment (`scripts/test --all` makes
one). The plugin comes to it as two folders on its path: this tree, and entry points.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.fleet.swaps.proposer import NUM_KEPT
from scripts.bench.fleet.installed import variables as plugin_variables
from tests.e2e.test_audit_vllm import vllm_server
from tests.e2e.test_vllm_cpu import speculation
from tests.e2e.workshop import draftsmith, save_model, save_target
from tests.e2e.workshop import texts as texts_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

K = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
PROMPTS = [[10 + (i * 37 + j * 11) % 270 for j in range(12)] for i in range(6)]


class Counts(NamedTuple):
    drafts: float
    accepted: float

    @property
    def tau(self) -> float:
        return 1 + self.accepted / max(1.0, self.drafts)


class Engine:
    """Requests to a running engine."""

    def __init__(self, url: str, log: Path):
        self.url, self.log = url, log

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300)

    def swap(self, folder: Path, version: str) -> httpx.Response:
        return self.post("/draftsmith/swap", {"folder": str(folder), "version": version})

    def worker(self) -> dict[str, Any]:
        found = httpx.get(f"{self.url}/draftsmith/status", timeout=60).json()
        return found["workers"][0]

    def counts(self) -> Counts:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = [
            sum(map(float, re.findall(rf"^vllm:spec_decode_{name}_total{{.*}} (\S+)$", text, re.M)))
            for name in ("num_drafts", "num_accepted_tokens")
        ]
        return Counts(*found)

    def generate(
        self, max_tokens: int = 64, prompts: Sequence[list[int]] = PROMPTS
    ) -> tuple[list[list[int]], Counts]:
        """Greedy answers to all prompts at once, and what was drafted and accepted for them."""
        texts: list[list[int]] = [[] for _ in prompts]
        before = self.counts()

        def one(index: int) -> None:
            body = {
                "model": "tiny", "prompt": prompts[index], "max_tokens": max_tokens,
                "temperature": 0.0, "ignore_eos": True, "return_token_ids": True,
            }  # fmt: skip
            answer = self.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text + self.log.read_text()[-3000:]
            texts[index] = answer.json()["choices"][0]["token_ids"]

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = self.counts()
        return texts, Counts(*(b - a for a, b in zip(before, after, strict=True)))


@contextmanager
def engine(
    model: Path, folder: Path, speculative: dict[str, Any], settings: dict[str, Any], *more: str
) -> Iterator[Engine]:
    options = [
        *more, "--max-model-len", "384", "--max-num-seqs", "8", "--enable-prefix-caching",
        "--additional-config", json.dumps({"draftsmith": settings}),
    ]  # fmt: skip
    variables = plugin_variables(folder / "installed")
    log = folder / "log.txt"
    with vllm_server(model, log, speculative, options=options, variables=variables) as url:
        yield Engine(url, log)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_target: Callable[..., str]) -> Path:
    """`target`, `draft` of the same shape with other weights, and `perfect`: the target again."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("target", 0), ("draft", 1)):
        make = partial(LlamaForCausalLM, LlamaConfig(**SHAPE))
        save_model(folder / name, make, tiny_target, seed=seed)
    shutil.copytree(folder / "target", folder / "perfect")
    return folder


def draft_lm(models: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(models / "draft"), "num_speculative_tokens": K}


@pytest.fixture(scope="module")
def running(models: Path) -> Iterator[Engine]:
    (models / "run").mkdir()
    settings = {"admin": True, "engine": "e2e", "cache": str(models / "run" / "cache")}
    with engine(models / "target", models / "run", draft_lm(models), settings) as found:
        yield found


def test_the_perfect_draft_is_accepted_whole(models: Path, running: Engine) -> None:
    alone, counts = running.generate()
    assert counts.tau < 1.5
    assert running.swap(models / "perfect", "2").json()["ok"]
    texts, counts = running.generate()
    assert texts == alone and counts.tau == 4.0
    digest = running.worker()["digest"]
    assert running.swap(models / "draft", "3").json()["ok"]
    assert running.worker()["digest"] != digest and running.generate()[1].tau < 1.5
    assert running.swap(models / "perfect", "4").json()["ok"]
    assert running.worker()["digest"] == digest and running.generate() == (texts, counts)


FIRST = "model.layers.0.mlp.up_proj.weight"


def with_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[FIRST].view(-1)[7] = torch.nan
    save_file(tensors, folder / "model.safetensors")


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-999])


def test_no_version_ends_the_engine(models: Path, running: Engine, tmp_path: Path) -> None:
    """All that may be wrong with one is in `tests/unit/fleet/swaps/test_swap.py`."""
    assert running.swap(models / "perfect", "10").json()["ok"]
    for spoil in (with_nan, truncated):
        folder = tmp_path / spoil.__name__
        shutil.copytree(models / "draft", folder)
        spoil(folder)
        refused = running.swap(folder, "11")
        assert refused.status_code == 409, spoil.__name__
        print(f"{spoil.__name__}: {refused.json()['error']['message']}"[:200])
        assert running.worker()["version"] == "10"
        assert running.generate(16)[1].tau == 4.0
    assert running.swap(tmp_path / "nothing", "12").status_code == 409
    assert running.generate(16)[1].tau == 4.0


def test_fifty_swaps_in_flight(models: Path, running: Engine) -> None:
    alone, _ = running.generate(256)
    stop, codes = threading.Event(), list[int]()

    def swap() -> None:
        while not stop.is_set():
            folder = models / ("perfect", "draft")[len(codes) % 2]
            codes.append(running.swap(folder, str(100 + len(codes))).status_code)

    thread = threading.Thread(target=swap)
    thread.start()
    while len(codes) < 50:
        texts, _ = running.generate(256)
        assert texts == alone
    stop.set()
    thread.join()
    assert set(codes) == {200}
    assert running.swap(models / "perfect", "999").json()["ok"]
    assert running.generate()[1].tau == 4.0


def test_prefixes_that_an_older_draft_cached_go_with_a_reset(models: Path, running: Engine) -> None:
    """Other prompts are too short for a cached block."""
    prompts = [[20 + (i * 31 + j * 7) % 260 for j in range(300)] for i in range(4)]
    assert running.swap(models / "draft", "50").json()["ok"]
    alone, _ = running.generate(32, prompts)
    assert running.swap(models / "perfect", "51").json()["ok"]
    texts, counts = running.generate(32, prompts)
    assert texts == alone
    assert running.post("/draftsmith/reset-prefix", {}).json() == {"reset": True}
    texts, again = running.generate(32, prompts)
    print(f"tau {counts.tau:.3f} behind an older draft's prefixes, {again.tau:.3f} after the reset")
    assert texts == alone and again.tau == 4.0 and counts.tau < 3.0


def publish(root: Path, version: int, source: Path) -> None:
    """As the learner's publisher leaves a version: files, manifest, then `current`."""
    folder = root / f"v{version:06d}"
    shutil.copytree(source, folder / "vllm")
    files = {}
    for path in sorted((folder / "vllm").iterdir()):
        data = path.read_bytes()
        known = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        files[f"vllm/{path.name}"] = known
    manifest = {"schema": 1, "version": version, "files": files, "layouts": ["vllm"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (root / "current").write_text(f"{version}\n")


def test_an_engine_follows_the_store_and_a_restart_too(models: Path, tmp_path: Path) -> None:
    root = tmp_path / "versions"
    root.mkdir()
    settings = {
        "versions": str(root), "engine": "one", "poll_s": 0.5, "cache": str(tmp_path / "cache"),
    }  # fmt: skip

    def status() -> dict[str, Any]:
        path = root / "engines" / "one.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def until(holds: Callable[[], object]) -> None:
        wait_until(holds, 120, said=lambda: running.log.read_text()[-5000:], pause_s=0.5)

    with engine(models / "target", tmp_path, draft_lm(models), settings) as running:
        assert running.worker()["records"] is None
        until(status)
        publish(root, 1, models / "perfect")
        until(lambda: status()["version"] == 1)
        assert running.generate()[1].tau == 4.0
        with_nan(shutil.copytree(models / "draft", tmp_path / "bad"))
        publish(root, 2, tmp_path / "bad")
        until(lambda: "2" in status()["refused"])
        assert status()["version"] == 1 and running.generate()[1].tau == 4.0
        publish(root, 3, models / "draft")
        until(lambda: status()["version"] == 3)
        assert running.generate()[1].tau < 1.5
        publish(root, 4, models / "perfect")
        until(lambda: status()["version"] == 4)
    (root / "engines" / "one.json").unlink()
    with engine(models / "target", tmp_path, draft_lm(models), settings) as running:
        until(lambda: status().get("version") == 4)
        assert running.generate()[1].tau == 4.0


def test_eagle3_drafts_as_if_it_had_been_started_with_the_version(
    tmp_path: Path, tiny_target: Callable[..., str]
) -> None:
    """Its embeddings are the target's, its vocabulary a part of it."""
    save_target(tmp_path, partial(LlamaForCausalLM, LlamaConfig(**SHAPE)), tiny_target)
    for name, steps in (("first", "1"), ("second", "200")):
        draftsmith(
            tmp_path, "train", "eagle3", "--target", "target", "--data", "data", "--out", name,
            "--steps", steps, "--held-out", "0.05", "--dtype", "float32", "optim.lr=3e-3",
            "draft.taps=[1,2,3]", "draft.draft_vocab_size=250",
        )  # fmt: skip
        draftsmith(tmp_path, "export", name, "--to", "vllm", "--out", f"{name}-vllm")
    # What the second draft knows by heart: no draft learns a random target's other texts.
    generate = partial(Engine.generate, prompts=[prompt for prompt, _ in texts_of(tmp_path)[:6]])
    found = {}
    for name in ("second", "first"):
        (tmp_path / name / "run").mkdir()
        settings = {"admin": True, "cache": str(tmp_path / name / "run" / "cache")}
        speculative = speculation(tmp_path, "eagle3", f"{name}-vllm")
        with engine(tmp_path / "target", tmp_path / name / "run", speculative, settings) as running:
            found[name] = generate(running)
            if name == "first":
                assert running.swap(tmp_path / "second-vllm", "2").json()["ok"]
                # It was tried on the target's states of the answers before.
                assert running.worker()["last_swap"]["recent_tokens"] == NUM_KEPT
                found["swapped"] = generate(running)
                assert running.swap(tmp_path / "first-vllm", "3").json()["ok"]
                assert generate(running) == found["first"]
    texts, counts = found["second"]
    print({name: f"tau {one[1].tau:.3f}" for name, one in found.items()})
    assert found["first"][0] == found["swapped"][0] == texts
    assert counts.tau > 1.2 > found["first"][1].tau
    # Rounds end where the answers of a batch happen to, so that the last of each may differ.
    assert found["swapped"][1].tau == pytest.approx(counts.tau, rel=0.03)
