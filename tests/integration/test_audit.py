"""`draftsmith audit --url` against our own running server, honest, and wrong at one
drafted depth."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.cli import main
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.options import OPTIONS as FAMILY_OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.config import EngineConfig
from tests.misreport import misreporting
from tests.stand_in_drafts import near

K = 4
CONFIG = EngineConfig(k=K, max_batch=64, max_length=96, max_round_tokens=1024)
# Wide as to what may stay unseen, so that few samples do.
SMALL = ("--contexts", "2", "--samples", "500", "--greedy-tokens", "8", "--bias", "0.24")

# whose untrained drafts are kept least often
WIDER = {"eagle1": ("--samples", "2000", "--temperature", "1.5")}


@pytest.fixture(scope="module")
def repeating(target_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A Markov chain with few likely tokens behind each: what followed a token before follows it
    again, often but not always."""
    folder = str(tmp_path_factory.mktemp("repeating"))
    shutil.copytree(target_folder, folder, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.model.norm.weight.mul_(3.0)
    model.save_pretrained(folder)
    return Target.load(folder)


def make(family: str, target: Target) -> ServingDrafter:
    if family == "suffix":
        return Suffix()
    if family != "draft-lm":
        return FAMILIES[family].create(FAMILY_OPTIONS[family](), target, seed=1).eval()
    # The target with some noise: most of its drafts are kept, not all.
    return near(target, 0.005)


def audit(server: Any, tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "report.json"
    status = main(["audit", "--url", server.url, *options, "--out", str(out)])
    return status, json.loads(out.read_text())[0]


def liar(
    live_server: Callable, target: Target, family: str, depth: int, factor: float = 3.0
) -> Any:
    drafter = misreporting(make(family, target), depth, target.vocab_size, factor=factor)
    return live_server(target, drafter, CONFIG)


def broken(report: dict[str, Any]) -> set[str]:
    checks = [check for check in report["checks"] if check["kind"] == "check"]
    return {check["name"] for check in checks if not check["passed"]}


def depth_name(depth: int) -> str:
    return f"tokens at drafted depth {depth}"


@pytest.mark.long
@pytest.mark.parametrize("depth, samples, verdict", [(None, 500, "lossless"), (2, 250, "lossy")])
def test_trees_are_audited_by_depth(
    depth: int | None,
    samples: int,
    verdict: str,
    target: Target,
    live_server: Callable,
    tmp_path: Path,
) -> None:
    """Two children of the root with two children each: six tokens, of which a round keeps two."""
    drafter = make("eagle3", target)
    if depth is not None:
        drafter = misreporting(drafter, depth, target.vocab_size)
    server = live_server(target, drafter, replace(CONFIG, tree="sampled:2x2"))
    options = (*SMALL, "--samples", str(samples), "--target", target.name)
    _, report = audit(server, tmp_path, *options)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks.keys() >= {depth_name(1), depth_name(2), "bonus tokens"}
    assert depth_name(3) not in checks
    assert report["verdict"] == verdict, report["sentence"]
    wrong = {depth_name(depth)} if depth else set()
    assert {depth_name(1), depth_name(2)} & broken(report) == wrong


LATER = [pytest.mark.long, pytest.mark.timeout(3000)]


@pytest.mark.parametrize(
    ("family", "depth", "factor", "options"),
    [
        ("draft-lm", 3, 3.0, ()),
        *(
            pytest.param(
                family, depth, 6.0, ("--samples", "1000", *WIDER.get(family, ())), marks=LATER
            )
            for family, depth in (("suffix", 3), ("eagle1", 4), ("draft-lm", 1))
        ),
    ],
)
def test_a_wrong_q_is_found_from_the_depth_on_where_it_is_wrong(
    family: str,
    depth: int,
    factor: float,
    options: tuple[str, ...],
    target: Target,
    live_server: Callable,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Untrained as they are, models draft to every depth; of text that repeats itself
    suffixes do, whose liar accepts a draft as if it had been drawn with probability 1 / 6. Nowhere
    before its depth is anything found."""
    served = request.getfixturevalue("repeating") if family == "suffix" else target
    server = liar(live_server, served, family, depth, factor)
    status, report = audit(server, tmp_path, *SMALL, *options, "--target", served.name)
    found, checks = broken(report), {check["name"]: check for check in report["checks"]}
    assert status == 1 and depth_name(depth) in found, checks[depth_name(depth)]["said"]
    assert not found & {depth_name(before) for before in range(1, depth)}
    assert "tokens without drafts" not in found and not any("greedy" in name for name in found)


@pytest.mark.long
def test_honest_drafts_from_repeating_text_are_not_called_lossy(
    repeating: Target, live_server: Callable, tmp_path: Path
) -> None:
    server = live_server(repeating, Suffix(), CONFIG)
    _, report = audit(server, tmp_path, *SMALL, "--samples", "1000", "--target", repeating.name)
    assert not broken(report) and report["verdict"] != "lossy", report["sentence"]
    (deepest,) = [check for check in report["checks"] if check["name"] == depth_name(K)]
    assert deepest["evidence"]["num_samples"] > 50


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_default_options_clear_an_honest_server(
    target: Target, live_server: Callable, tmp_path: Path
) -> None:
    server = live_server(target, make("draft-lm", target), CONFIG)
    status, report = audit(server, tmp_path)
    assert status == 0 and report["verdict"] == "lossless", report["sentence"]
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["control: draft tokens offered meanwhile"]["passed"]
    assert {*map(depth_name, range(1, K + 1)), "bonus tokens"} <= checks.keys()
    # The server can be told not to speculate.
    greedy = [name for name in checks if name.startswith("greedy text against plain decoding")]
    same = f"both texts are the same {AuditConfig().greedy_tokens} tokens"
    assert [checks[name]["said"] for name in greedy] == [same] * AuditConfig().contexts


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_default_options_find_a_wrong_q_at_its_depth(
    target: Target, live_server: Callable, tmp_path: Path
) -> None:
    status, report = audit(liar(live_server, target, "draft-lm", 4), tmp_path)
    found = broken(report)
    assert status == 1 and depth_name(4) in found and not found & set(map(depth_name, range(1, 4)))
