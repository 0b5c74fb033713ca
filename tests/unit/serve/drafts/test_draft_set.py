"""Which draft a request gets."""

from __future__ import annotations

from typing import Any

from draftsmith.drafters.versions import in_canary
from draftsmith.record import hashed
from draftsmith.serve.drafts.draft_set import DraftSet
from draftsmith.serve.requests.request import CANARY, LIVE, Request
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.stats import EngineStats


def test_the_trial_gets_its_share_by_the_requests_id_alone() -> None:
    unused: Any = object()
    drafts = DraftSet(unused, unused, EngineStats(), make_ready=unused, requests=list)

    def chosen(k: int = 2) -> list[str]:
        requests = [
            Request(f"answer-{number}", [1, 2], 2, SamplingParams(), seed=3, k=k, max_tokens=9)
            for number in range(4000)
        ]
        for request in requests:
            drafts.route(request)
        return [request.draft_name for request in requests]

    assert set(chosen()) == {LIVE}
    drafts.canary_share = 0.1
    assert set(chosen()) == {LIVE}, "no version is on trial"
    drafts.put(CANARY, unused)
    found = chosen()
    of_share = [in_canary(hashed(f"answer-{number}"), 0.1) for number in range(4000)]
    assert [name == CANARY for name in found] == of_share and 300 < sum(of_share) < 500
    assert set(chosen(k=0)) == {LIVE}
    assert sum(drafts.stats.routed.values()) == 3 * 4000
    drafts.retire(CANARY)
    assert set(chosen()) == {LIVE}
