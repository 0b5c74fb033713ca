"""A restart at another version, and rehearsal of what a draft was trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from draftsmith.distill.buffer.traffic import is_held_out_prompt
from draftsmith.distill.config import DistillConfig, LearnConfig
from draftsmith.drafters import versions
from tests.data_folders import rows_of, write_rows
from tests.integration.conftest import learner_of


def watched_only(made: Any) -> DistillConfig:
    return replace(made.config, gate=replace(made.config.gate, every=1000))


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


def test_the_draft_is_rehearsed(loop: Callable[..., Any]) -> None:
    made = loop()
    prompts = [[5, 6, 7 + number] for number in range(20)]
    data = write_rows(made.root / "data", rows_of(prompts, [[8, 9]] * 20, held_out=()))
    learner = learner_of(replace(made.config, learn=replace(LearnConfig(), rehearse=(str(data),))))
    rehearsal = learner.track.learner.rehearsal
    assert rehearsal is not None
    held_out = [
        is_held_out_prompt(row.tokens[:3], made.config.gate.held_out) for row in rehearsal.rows
    ]
    assert held_out and not any(held_out)
