"""alpha without the target's weights: from what records hold, where they hold it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from draftsmith.distill.buffer.record_table import tokens_only
from draftsmith.distill.config import GateConfig
from draftsmith.distill.gate.gate import decide
from draftsmith.distill.gate.regression import watch
from draftsmith.distill.gate.scoring import Scorer, score_drafters
from draftsmith.distill.gate.sequential import Evidence, Ledger
from draftsmith.drafters.target.target import Target
from draftsmith.train.objective.outline import TargetOutline, load_outline
from tests.round_records import served_text

SIZES = {"max_depth": 3, "max_length": 512}


@pytest.fixture(scope="module")
def outline(tiny_target: Callable[..., str]) -> TargetOutline:
    return load_outline(tiny_target("llama"), trust_remote_code=False)


def test_alpha_is_the_targets_where_the_logged_tokens_suffice_and_the_middle_of_bounds_elsewhere(
    texts_by: Callable, bigram: Callable, served_texts: Callable, target: Target, outline: Target
) -> None:
    drafter = bigram(288)
    exact = texts_by(target, drafter, 3, top_k=20)
    for own, logged in zip(
        score_drafters([drafter], target, exact, **SIZES)[0],
        score_drafters([drafter], outline, exact, **SIZES)[0],
        strict=True,
    ):
        np.testing.assert_allclose(logged.alpha, own.alpha, atol=1e-3)
        np.testing.assert_allclose(logged.least, own.alpha, atol=1e-3)
        assert logged.kept.tolist() == own.kept.tolist() and logged.is_consistent
    flat = served_texts(3)
    (own, *_), (logged, *_) = (
        score_drafters([drafter], one, flat, **SIZES)[0] for one in (target, outline)
    )
    # The middle of the bounds; a version is rolled back as served wrongly for the lower one alone.
    low, high = logged.least, 2 * logged.alpha - logged.least
    assert (low <= own.alpha + 1e-4).all() and (own.alpha <= high + 1e-4).all()
    assert (high - low).max() > 0.1
    np.testing.assert_array_equal(own.least, own.alpha)


def test_positions_without_a_logged_p_are_left_out(
    texts_by: Callable, bigram: Callable, target: Target, outline: Target
) -> None:
    (text,) = texts_by(target, bigram(288), 1, top_k=20)
    records = text.records
    partly = served_text(tokens_only(one) if one.round % 2 else one for one in records)
    some, every = (
        score_drafters([bigram(288)], outline, [one], **SIZES)[0][0] for one in (partly, text)
    )
    is_logged = [one.round % 2 == 0 for one in records for _ in range(min(one.accepted + 1, 3))]
    np.testing.assert_array_equal(some.alpha, every.alpha[np.array(is_logged)[: len(every.alpha)]])


def test_a_better_candidate_is_accepted_and_a_sound_version_stays(
    bigram: Callable, served_texts: Callable, outline: Target
) -> None:
    live = bigram(288)
    texts = served_texts(16)
    scorer = Scorer(live, outline, max_length=512)
    config = GateConfig(requests=8)
    same = decide(scorer, bigram(288), texts, config, max_depth=3, evidence=Evidence())
    assert same.decision == "hold" and same.comparison.gain == 0 and same.comparison.requests == 16
    watched = watch(scorer, [], texts, config, version="1", max_depth=3, evidence=Ledger())
    assert watched.reason == "" and watched.served.requests == 16
