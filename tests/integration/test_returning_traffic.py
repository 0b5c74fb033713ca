"""Traffic that goes and comes back: what was learned before is in training still, and the version
that was left goes live again once it is better."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.distill import command as daemon
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.gate.gate import Decision, decide
from draftsmith.distill.gate.sequential import Evidence
from draftsmith.drafters import checkpoint, versions
from tests.integration.conftest import learner_of


def watched_only(made: Any) -> DistillConfig:
    return replace(made.config, gate=replace(made.config.gate, every=1000))


def weaken(drafter: torch.nn.Module, share: float) -> None:
    """Adds noise of a share of each parameter's size."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += share * parameter.std() * noise


@pytest.mark.long
@pytest.mark.parametrize("decision", ["accept", "none"])
def test_what_was_learned_goes_on_after_a_rollback_unless_no_gate_has_seen_it(
    loop: Callable[..., Any], decision: str
) -> None:
    made = loop("perfect")
    daemon.run(made.config)
    made.shuffle(made.draft)
    made.publish(made.draft, decision=decision)
    made.serve(60, version=2, folder=versions.open_version(made.versions, 2))
    daemon.run(watched_only(made))
    (rolled,) = made.decisions("rolled back")
    assert (rolled["left"], rolled["version"]) == (2, 1)
    state, is_kept = made.state(), decision == "accept"
    track = state["track"]
    assert track["displaced"] == (2 if is_kept else None)
    # The steps of before count on, or begin again.
    assert (track["steps"] > 0) == is_kept
    assert (track["spared"] > 0) == is_kept
    assert learner_of(made.config).track.lifecycle.spared == track["spared"]
    # Held-out texts are of other traffic.
    assert (made.status()["window"] == 0) == is_kept
    first = dict(checkpoint.load(made.root / "draft", made.target).named_parameters())
    is_first = all(torch.equal(value, first[name]) for name, value in state["candidate"].items())
    assert is_first == (not is_kept)


@pytest.mark.long
@pytest.mark.parametrize("is_displaced", [True, False])
def test_a_version_that_was_left_goes_live_again_when_its_traffic_is_back(
    loop: Callable[..., Any], is_displaced: bool
) -> None:
    """A restart in between included; without the rollback before, nothing but ancestors is
    returned to."""
    made = loop("perfect")
    assert made.target is not None
    good = made.root / "good"
    checkpoint.save(made.draft, good, made.target)
    made.shuffle(made.draft)
    checkpoint.save(made.draft, made.root / "draft", made.target)
    learner = learner_of(watched_only(made))
    assert made.publish(checkpoint.load(good, made.target)) == 2
    versions.rollback(made.versions, 1, "traffic was other")
    if is_displaced:
        track = learner.track
        track.live.watch.displace(2, track.live.scorer.of(track.learner.drafter))
    learner.save()
    made.serve(60)
    daemon.run(watched_only(made))
    assert versions.latest(made.versions) == (2 if is_displaced else 1)
    track = made.state()["track"]
    # The one that was left last is the other one now.
    assert track["displaced"] == (1 if is_displaced else None)


@pytest.mark.parametrize(
    ("noise", "is_restarted", "num_kept"),
    [(0.05, False, 2), (3.0, False, 0), pytest.param(0.05, True, 0, marks=pytest.mark.long)],
)
def test_a_candidate_that_catches_up_is_spared_for_a_while_and_no_other(
    loop: Callable[..., Any], noise: float, is_restarted: bool, num_kept: int
) -> None:
    """All are worse than the live version with evidence; the second one, which training broke, than
    the version that was left, too. The third one began again after the rollback."""
    made = loop("perfect")
    learner = learner_of(watched_only(made))
    track, live = learner.track, learner.track.live
    made.serve(60)
    learner.take_in()
    learner.sort_in_finished(idle_s=0.0)
    left = checkpoint.load(made.root / "draft", made.target)
    weaken(left, 0.1)
    live.watch.displace(2, live.scorer.of(left))
    track.lifecycle.spared = 2
    if is_restarted:
        track.lifecycle.start_over()
    weaken(track.learner.drafter, noise)
    weakened = [one.clone() for one in track.learner.drafter.parameters()]

    def decision() -> Decision:
        texts, gate = track.window, track.config.gate
        return decide(
            live.scorer, track.learner.drafter, texts, gate, max_depth=track.depth,
            evidence=Evidence(),
        )  # fmt: skip

    comparison = decision().comparison
    assert comparison.gain < 0 and comparison.p_value <= track.config.gate.error

    def is_at(parameters: Iterable[torch.Tensor]) -> bool:
        mine = track.learner.drafter.parameters()
        return all(torch.equal(*pair) for pair in zip(mine, parameters, strict=True))

    for _ in range(num_kept):
        track.gate()
        assert is_at(weakened)
    track.gate()
    assert is_at(live.draft.parameters()) and live.watch.displaced is not None


def test_a_restart_at_another_version_judges_the_candidate_on_new_traffic_alone(
    loop: Callable[..., Any],
) -> None:
    """As after an end between a rollback and its save."""
    made = loop("perfect")
    learner = learner_of(watched_only(made))
    assert made.publish(made.draft, decision="accept") == 2
    learner.track.lifecycle.follow()
    made.serve(20, version=2)
    learner.take_in()
    learner.sort_in_finished(idle_s=0.0)
    learner.save()
    num_held_out = len(learner.track.window)
    assert len(learner_of(watched_only(made)).track.window) == num_held_out > 0
    versions.rollback(made.versions, 1, "traffic was other")
    after = learner_of(watched_only(made)).track
    assert after.live.version == 1 and after.window == []
