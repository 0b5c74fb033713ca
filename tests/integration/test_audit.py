"""`draftsmith audit --url` against our own running server, honest and not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.cli import main
from draftsmith.drafters.draft_lm import DraftLm
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.target import Target
from draftsmith.serve.config import EngineConfig

OPTIONS = ("--contexts", "1", "--samples", "2000", "--temperature", "0.6", "--top-k", "8", "--greedy-tokens", "16")


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"))


class Overconfident:
    """A draft model that tells verification a sharper law than the one its tokens were drawn from."""

    def __init__(self, drafter: DraftLm):
        self.drafter = drafter
        self.family, self.taps, self.new_pool = drafter.family, drafter.taps, drafter.new_pool
        self.cached_after = drafter.cached_after

    def propose(self, inputs: DraftInputs) -> Proposal:
        proposal = self.drafter.propose(inputs)
        return proposal if proposal.logits is None else replace(proposal, logits=proposal.logits * 3)


@pytest.fixture(scope="module")
def drafter(target: Target) -> DraftLm:
    """The target with some noise: most of its drafts are kept, not all."""
    drafter = DraftLm.create(DraftLmOptions(init=target.name), target, seed=1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return drafter.eval()


def audit(server: Any, tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "report.json"
    status = main(["audit", "--url", server.url, *OPTIONS, *options, "--out", str(out)])
    return status, json.loads(out.read_text())[0]


def engine_config() -> EngineConfig:
    return EngineConfig(k=2, max_batch=64, max_length=80, max_round_tokens=1024)


def test_our_server_is_lossless(target: Target, drafter: DraftLm, live_server: Callable, tmp_path: Path) -> None:
    status, report = audit(live_server(target, drafter, engine_config()), tmp_path)
    assert status == 0 and report["verdict"] == "lossless", report["sentence"]
    assert "control: draft tokens offered meanwhile" in {check["name"] for check in report["checks"]}
    compared = [check for check in report["checks"] if check["name"].startswith("greedy text against plain decoding")]
    assert [check["said"] for check in compared] == ["16 tokens, the same"], "the server can be told not to speculate"


def test_a_law_that_logprobs_do_not_tell_is_held_against_samples_without_drafts(
    target: Target, drafter: DraftLm, live_server: Callable, tmp_path: Path
) -> None:
    """Top-p alone, of a server that judges its drafts as blocks."""
    server = live_server(target, drafter, replace(engine_config(), verification="block"))
    status, report = audit(server, tmp_path, "--top-k", "0", "--top-p", "0.7")
    assert status == 0 and report["verdict"] == "lossless", report["sentence"]
    assert "token 2 given its prefix, against plain samples" in {check["name"] for check in report["checks"]}


def test_a_wrong_q_is_found_and_only_in_what_was_sampled(
    target: Target, drafter: DraftLm, live_server: Callable, tmp_path: Path
) -> None:
    """The law comes from the target run here this time, which must agree with what the server does without drafts."""
    server = live_server(target, Overconfident(drafter), engine_config())
    status, report = audit(server, tmp_path, "--target", target.name)
    assert status == 1 and report["verdict"] == "lossy"
    broken = {check["name"] for check in report["checks"] if check["kind"] == "law" and not check["passed"]}
    assert "token 2 given its prefix, counts" in broken
    assert not broken & {"token 1 given its prefix, counts", "greedy identity, context 0"}
