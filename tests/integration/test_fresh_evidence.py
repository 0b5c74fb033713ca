"""New training texts as evidence of the gate: scored by the candidate that was not trained on them
yet, once, and only as far as they are kept."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import GateConfig
from draftsmith.distill.daemon import Daemon
from draftsmith.distill.gate.gate import pairs_of
from draftsmith.distill.learn.learner import Learner
from tests.integration import conftest


def learner_of(made: Any, gate: GateConfig) -> Daemon:
    learn = replace(made.config.learn, fresh=8, most_fresh=8, steps=4)
    config = replace(made.config, learn=learn, gate=gate)
    return conftest.learner_of(config, io.StringIO())


@pytest.mark.long
def test_a_text_is_scored_before_the_candidate_is_trained_on_it(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loop()
    made.serve(40)
    daemon = learner_of(made, GateConfig(requests=10**6))
    track, trained = daemon.track, []
    update = Learner.update

    def noted(self: Learner, fresh: Sequence[ServedText], *rest: Any) -> Any:
        with self.averaged() as candidate:
            live = track.live.scorer
            expected = pairs_of(live, live.of(candidate), fresh, max_depth=3).differences
        known = track.live.ledger.gate.fresh
        # the first candidate is the live draft itself
        assert {one: known.get(one) for one in expected} == expected if trained else not known
        trained.append([text.request for text in fresh])
        return update(self, fresh, *rest)

    monkeypatch.setattr(Learner, "update", noted)
    while not trained[2:]:
        daemon.cycle()
    assert list(track.live.ledger.gate.fresh) == [one for some in trained[1:] for one in some]
    assert any(track.live.ledger.gate.fresh.values())


def test_a_decision_counts_them_and_the_newest_alone_keep_their_distributions(
    loop: Callable[..., Any],
) -> None:
    made = loop()
    made.serve(40)
    daemon = learner_of(made, GateConfig(requests=2, every=2, window=20))
    daemon.take_in()
    kept = [text.is_scorable for text in daemon.track.fresh]
    assert kept == [False] * (len(kept) - 20) + [True] * 20 and len(kept) > 20
    while not made.decisions():
        daemon.cycle()
    assert 0 < made.decisions()[0]["fresh_requests"] < 16


def test_held_out_requests_alone_decide_when_asked(loop: Callable[..., Any]) -> None:
    made = loop()
    made.serve(40)
    daemon = learner_of(made, GateConfig(requests=2, fresh=False))
    daemon.take_in()
    assert not any(text.is_scorable for text in daemon.track.fresh)
    while not made.decisions():
        daemon.cycle()
    assert made.decisions()[0]["fresh_requests"] == 0
