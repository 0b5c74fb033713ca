"""Which ends of requests are measured for choosing a class's draft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.serve.drafts.draft_set import DraftSet
from draftsmith.serve.requests.request import Request, Route, class_draft
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.stats import EngineStats

CODE = class_draft("code")


@pytest.mark.parametrize("params, pool_class, measured", [
    (SamplingParams(temperature=1.0), "code", True),
    (SamplingParams(temperature=0.0, seed=3), "code", True),
    (SamplingParams(temperature=1.0), "", False),  # no class with a draft of its own
    # Another request with that seed draws the same: a draft chosen by these draws would bias it.
    (SamplingParams(temperature=1.0, seed=3), "code", False),
])  # fmt: skip
def test_only_requests_whose_draws_nobody_shares_are_measured(
    params: SamplingParams, pool_class: str, measured: bool
) -> None:
    unused: Any = None
    drafts = DraftSet(None, unused, EngineStats(), make_ready=unused, requests=unused)
    told: list[tuple[Route, int, int]] = []
    drafts.router = SimpleNamespace(observe=lambda *given: told.append(given))  # type: ignore[assignment]
    route = Route(CODE, pool_class)
    request = Request("a", [1, 2, 3], 1, params, seed=3, k=2, max_tokens=9, route=route)
    request.speculation.add(2, 1, 2, own=True)
    drafts.finished(request)
    assert told == ([(route, 2, 1)] if measured else [])
