"""The gate: alpha against a direct computation, its error rates, harmful candidates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from draftsmith.distill.config import GateConfig, LearnConfig, LearnUnroll
from draftsmith.distill.gate import scoring
from draftsmith.distill.gate.gate import alphas_of, compare, decide, regate, weigh
from draftsmith.distill.gate.regression import Earlier, watch
from draftsmith.distill.gate.scoring import Scorer, score_drafters
from draftsmith.distill.gate.sequential import Evidence, Ledger
from draftsmith.distill.learn.learner import Learner
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.overlap import overlap
from draftsmith.kernels.sampling.filters import SamplingRows, process


def test_score_is_the_overlap_of_the_distributions_at_verified_positions(
    texts_by: Callable, bigram: Callable, target: Target
) -> None:
    other = bigram(288, seed=3)
    texts = texts_by(target, bigram(288), 3, temperature=0.8, top_k=30)
    found = score_drafters([other], target, texts, max_depth=8, max_length=512)[0]
    for text, scored in zip(texts, found, strict=True):
        expected, kept = [], []
        for record in text.records:
            for depth in range(min(record.accepted + 1, len(record.drafted))):
                context = text.tokens[: record.position + depth]
                assert (
                    context
                    == (text.tokens[: record.position] + record.drafted)[: record.position + depth]
                )
                rows = SamplingRows.of([0.8], top_k=[30])
                p = process(target.model(torch.tensor([context])).logits[0, -1:].float(), rows)
                expected.append(float(overlap(p, process(other.logits(context[-1])[None], rows))))
                kept.append(depth < record.accepted)
        np.testing.assert_allclose(scored.alpha, expected, atol=1e-4)
        assert scored.is_consistent
        assert scored.kept.tolist() == kept


def test_texts_are_scored_once_however_many_windows_ask(
    bigram: Callable, served_texts: Callable, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate's window and the watch's take turns, as a learner's cycles do: of 26 texts that are
    asked for 10 are scored."""
    texts = served_texts(10)
    counts: list[int] = []

    def counted(drafters, target, texts, **options):
        counts.append(len(texts))
        return score_drafters(drafters, target, texts, **options)

    monkeypatch.setattr(scoring, "score_drafters", counted)
    live = Scorer(bigram(288, seed=3), target, max_length=512)
    windows = [texts[:8], texts[4:6], texts[:8], texts[2:]]
    found = [live.score(window, max_depth=3) for window in windows]
    assert counts == [8, 2]
    assert all(a is b for a, b in zip(found[0][2:], found[3][:6], strict=True))


@pytest.mark.long
def test_texts_of_another_target_contradict_their_logged_distributions(
    texts_by: Callable, bigram: Callable, target: Target, tiny_target: Callable
) -> None:
    other = Target.load(tiny_target("llama", seed=1))
    foreign = texts_by(other, bigram(288), 16, temperature=0.5)
    sharp = bigram(288)
    with torch.no_grad():
        sharp.states.weight.mul_(8)
    for judge, is_own in ((target, False), (other, True)):
        scored = score_drafters([sharp], judge, foreign, max_depth=3, max_length=512)[0]
        assert {one.is_consistent for one in scored} == {is_own}
    scorer = Scorer(sharp, target, max_length=512)
    decision = decide(
        scorer, bigram(288), foreign, GateConfig(requests=16), max_depth=3, evidence=Evidence()
    )
    assert decision.decision == "refuse" and "contradict" in decision.reason


@pytest.mark.parametrize(
    ("gain", "requests", "evidence", "decision"),
    [
        (0.1, 40, 20.0, "accept"),
        (0.1, 40, 19.9, "hold"),
        (0.001, 40, 1e6, "hold"),
        (-0.1, 40, 1e6, "hold"),
        (0.1, 5, 1e6, "hold"),
    ],
)
def test_weigh(gain: float, requests: int, evidence: float, decision: str) -> None:
    live = [np.full(4, 0.5)] * requests
    config = GateConfig(requests=16, gain=0.002, error=0.05)
    found = weigh(compare(live, [one + gain for one in live]), evidence, config)
    assert found.decision == decision and found.to_dict()["gain"] == pytest.approx(gain)
    assert found.to_dict()["p_value"] == pytest.approx(1 / evidence)


@pytest.mark.long
def test_candidates_better_equal_shuffled_and_broken(
    bigram: Callable, served_texts: Callable, target: Target
) -> None:
    live = bigram(288)
    texts = served_texts(24)
    better = bigram(288)
    # On the very texts it is then judged by: the gate is under test here, not the learner.
    Learner(
        better, target, LearnConfig(lr=2e-2, steps=60, unroll=LearnUnroll(steps=1)), seed=0
    ).update(texts)
    shuffled = bigram(288)
    shuffled.load_state_dict(better.state_dict())
    with torch.no_grad():
        shuffled.head.copy_(
            better.head[torch.randperm(288, generator=torch.Generator().manual_seed(0))]
        )
    broken = bigram(288)
    with torch.no_grad():
        broken.head[5, 5] = float("nan")
    config = GateConfig(requests=16)
    scorer = Scorer(live, target, max_length=512)
    for candidate, decision in (
        (better, "accept"), (live, "hold"), (shuffled, "hold"), (broken, "refuse"),
    ):  # fmt: skip
        found = decide(scorer, candidate, texts, config, max_depth=3, evidence=Evidence())
        assert found.decision == decision
    untouched = Evidence()
    few = decide(scorer, better, texts[:10], config, max_depth=3, evidence=untouched)
    assert few.decision == "hold" and "10 held-out requests" in few.reason
    assert untouched == Evidence()


def test_overflowing_candidate_is_refused(
    bigram: Callable, served_texts: Callable, target: Target
) -> None:
    """Finite weights whose distribution is not: the check of the weights alone would
    let it pass."""
    texts = served_texts(16)
    candidate = bigram(288)
    with torch.no_grad():
        candidate.states.weight.fill_(1e30)
        candidate.head.fill_(1e30)
        candidate.head[::2].neg_()
    scorer = Scorer(bigram(288), target, max_length=512)
    decision = decide(
        scorer, candidate, texts, GateConfig(requests=4), max_depth=3, evidence=Evidence()
    )
    assert decision.decision == "refuse"


def test_distributions_of_the_live_draft_that_are_not_finite_are_never_accepted(
    bigram: Callable, served_texts: Callable, target: Target
) -> None:
    """They are a loss, which can be compared, and neither a gain of whatever candidate nor the end
    of all comparisons."""
    texts = served_texts(16)
    live, worse = bigram(288), bigram(288, seed=5)
    with torch.no_grad():
        live.states.weight[texts[0].tokens[8]] = torch.nan
        worse.states.weight.mul_(30)
    config = GateConfig(requests=16)
    decision = decide(
        Scorer(live, target, max_length=512), worse, texts, config, max_depth=3, evidence=Evidence()
    )
    assert decision.decision == "hold" and decision.comparison.gain < 0
    with torch.no_grad():
        live.states.weight[::2] = torch.nan
    scorers = [Scorer(one, target, max_length=512) for one in (live, bigram(288))]
    held_to = [Earlier(0, scorers[1], config.drop)]
    assert (
        watch(
            scorers[0], held_to, texts, config, version="1", max_depth=3, evidence=Ledger()
        ).version
        == 0
    )


def test_a_draft_goes_on_under_a_new_target_where_its_predicted_alpha_reaches_the_floor(
    bigram: Callable, served_texts: Callable, target: Target
) -> None:
    """Just below its alpha and just above it; how far the texts differ changes nothing."""
    live, texts = Scorer(bigram(288), target, max_length=512), served_texts(12)
    alpha = float(np.concatenate(alphas_of(live, texts, max_depth=3)).mean())
    for floor, count, decision in (
        (alpha - 1e-6, 12, "accept"),
        (alpha + 1e-6, 12, "hold"),
        (alpha - 1e-6, 11, "hold"),
    ):
        found = regate(live, texts[:count], GateConfig(floor=floor, requests=12), max_depth=3)
        assert found.decision == decision, found.reason
