"""Report on the drafted and accepted tokens of one request, under vLLM's field names and ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from draftsmith.serve.requests.request import Request, SpeculationStats

Level = Literal["none", "summary", "detailed"]


def speculation_report(stats: SpeculationStats, k: int, *, level: Level) -> dict[str, Any]:
    """Report with vLLM's fields, and with `tau` (of the rounds that drafted), the committed tokens
    and all target passes.

    `k` is the draft length that the request was to have; a round may offer fewer tokens, or more
    where it is chosen. "detailed" adds numbers of every round.
    """
    # Clients hold the histogram's length against this number, and a round may go deeper than asked
    # for.
    deepest = max([k, *stats.offered])
    drafts, offered, accepted = len(stats.offered), sum(stats.offered), sum(stats.accepted)
    body: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
        "draft_acceptance_rate": accepted / offered if offered else 0.0,
        "acceptance_histogram": histogram(stats.accepted, deepest),
        "acceptance_histogram_by_draft_length": by_draft_length(stats),
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": offered,
        "num_spec_tokens": deepest,
        "num_target_passes": stats.num_passes,
        "num_committed_tokens": stats.num_committed,
        "tau": sum(stats.committed) / drafts if drafts else None,
    }
    if level == "detailed":
        body["per_step_accepted"] = stats.accepted
        body["per_step_drafted"] = stats.offered
        body["per_step_committed"] = stats.committed
        body["per_step_begin"] = stats.begins
    return body


def drafting_state(answer: str, requests: Sequence[Request]) -> dict[str, Any]:
    """Drafting of an answer that is being made, one entry per choice."""
    return {
        "id": answer,
        "object": "speculation",
        "choices": [
            {
                "k": request.k,
                "drafting": request.drafting.value,
                **speculation_report(request.speculation, request.k, level="summary"),
            }
            for request in requests
        ],
    }


def histogram(accepted: Sequence[int], deepest: int) -> list[int]:
    """Numbers of rounds that accepted 0, 1, ..., `deepest` tokens."""
    return [accepted.count(count) for count in range(deepest + 1)]


def by_draft_length(stats: SpeculationStats) -> dict[str, list[int]]:
    """Histogram of the rounds of each draft length: short drafts cannot be accepted far, which one
    histogram would hide."""
    groups: dict[int, list[int]] = {}
    for offered, accepted in zip(stats.offered, stats.accepted, strict=True):
        groups.setdefault(offered, []).append(accepted)
    return {str(length): histogram(group, length) for length, group in sorted(groups.items())}
