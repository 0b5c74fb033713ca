"""Which draft a request gets, and what measured acceptance changes of it."""

from __future__ import annotations

import random

import numpy as np

from draftsmith.drafters.pool import DraftPool, PromptClusters, vector
from draftsmith.drafters.versions import in_canary
from draftsmith.serve.drafts.draft_set import FEWEST, PROBES, WINDOW, Router, is_probe
from draftsmith.serve.requests.request import CANARY, LIVE, Route, class_draft

CODE = class_draft("code")
IDS = [f"answer-{number}" for number in range(4000)]


def pooled() -> Router:
    router = Router()
    router.pool = DraftPool({"code": "c01"})
    return router


def chosen(
    router: Router, request_class: str = "code", ready: tuple[str, ...] = (LIVE, CODE, CANARY)
) -> list[str]:
    return [router.choose(one, request_class, [1, 2], ready).draft for one in IDS]


def feed(router: Router, draft: str, rate: float, count: int = WINDOW, seed: int = 0) -> None:
    chance = random.Random(seed)
    for _ in range(count):
        router.observe(Route(draft, "code"), 20, sum(chance.random() < rate for _ in range(20)))


def test_nothing_but_the_live_draft_without_a_trial_and_a_pool() -> None:
    assert set(chosen(Router())) == {LIVE}
    assert Router().choose("a", "code", [1], [LIVE, CODE, CANARY]) == Route(LIVE, "")


def test_the_trial_gets_its_share_by_the_requests_id_alone() -> None:
    router = Router()
    router.canary_share = 0.1
    drafts = chosen(router)
    assert [draft == CANARY for draft in drafts] == [in_canary(one, 0.1) for one in IDS]
    assert 300 < drafts.count(CANARY) < 500
    assert set(chosen(router, ready=(LIVE,))) == {LIVE}


def test_a_class_of_the_pool_gets_its_draft_and_the_live_one_stays_known() -> None:
    router = pooled()
    router.canary_share = 0.2
    drafts = chosen(router)
    probes = [draft for draft, one in zip(drafts, IDS, strict=True) if is_probe(one)]
    assert (
        drafts.count(CODE) == len(IDS) - len(probes) and abs(len(probes) / len(IDS) - PROBES) < 0.02
    )
    # Whoever is left for the live draft takes part in the trial, in the same shares.
    assert abs(probes.count(CANARY) / len(probes) - 0.2) < 0.08
    assert CODE not in chosen(router, "prose")
    assert CODE not in chosen(router, ready=(LIVE,))


def test_a_draft_measured_worse_than_the_live_one_is_left_and_probed_until_it_is_not() -> None:
    router = pooled()
    feed(router, CODE, 0.4)
    assert router.prefers("code"), "nothing is known of the live draft"
    feed(router, LIVE, 0.6, count=FEWEST - 1)
    assert router.prefers("code"), "too little is"
    feed(router, LIVE, 0.6, seed=1)
    assert not router.prefers("code")
    share = chosen(router).count(CODE) / len(IDS)
    assert abs(share - PROBES) < 0.02
    feed(router, CODE, 0.7, seed=2)
    assert router.prefers("code")
    feed(router, CODE, 0.2, seed=3)
    router.forget(CODE)
    assert router.prefers("code"), "new weights, a new chance"


def test_equal_drafts_are_seldom_told_apart() -> None:
    """The bound is crossed by chance for few windows; the control is a draft that is worse."""
    left = dict.fromkeys((0.5, 0.35), 0)
    for rate in left:
        for seed in range(200):
            router = pooled()
            feed(router, LIVE, 0.5, seed=seed)
            feed(router, CODE, rate, seed=1000 + seed)
            left[rate] += not router.prefers("code")
    assert left[0.5] <= 3 and left[0.35] >= 190


def test_a_request_without_a_tag_belongs_to_the_cluster_of_its_prompt() -> None:
    weights = np.ones(64)
    code, prose = ([7, 7, 8], [40, 41, 41])
    clusters = PromptClusters(weights, np.stack([vector(code, weights), vector(prose, weights)]))
    router = Router()
    router.pool = DraftPool({"(cluster 2)": "c01"}, clusters=clusters)
    ready = [LIVE, class_draft("(cluster 2)")]
    drafts = {
        name: {router.choose(one, "", name, ready).draft for one in IDS[:50]}
        for name in (tuple(code), tuple(prose))
    }
    assert drafts[tuple(code)] == {LIVE} and class_draft("(cluster 2)") in drafts[tuple(prose)]
    assert router.choose("a", "tagged", prose, ready).draft == LIVE


def test_requests_that_drafted_nothing_or_belong_to_no_class_say_nothing() -> None:
    router = pooled()
    for _ in range(WINDOW):
        router.observe(Route(LIVE, ""), 20, 20)
        router.observe(Route(CODE, "code"), 0, 0)
    feed(router, LIVE, 0.9)
    assert router.prefers("code")
