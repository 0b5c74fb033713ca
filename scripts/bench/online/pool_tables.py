"""Tables of drafts by class and of what a perfect choice could gain. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from draftsmith.serve.requests.route import LIVE
from scripts.bench.drafters.figures import Figure
from scripts.bench.markdown_table import header, line
from scripts.bench.online.cells import (
    BOUND,
    CLUSTERED,
    FIRST,
    POOLS,
    SECOND,
    SINGLE,
    STATIC,
    TAGGED,
    THIRD,
)
from scripts.bench.online.figures import Answers, pooled_alpha, pooled_tau
from scripts.bench.online.measures import cpu_seconds, of_domain, over_seeds, results

Row = dict[str, Any]
KINDS = (FIRST, SECOND, THIRD)
TOLD = {
    STATIC: "static",
    SINGLE: "single, learned",
    TAGGED: "by tag",
    CLUSTERED: "by learned cluster",
}
BOUNDS = {
    "static": "static",
    "one": "one draft for all",
    "three": "three drafts, as many tokens in all",
    "three, from the one": "three drafts, begun at the one",
    "three, as many tokens each": "three drafts, as many tokens each",
    "one, from all of these": "one draft for all, trained on all of these",
}


def pools_table(rows: Sequence[Row]) -> list[str]:
    lines = header(
        "drafts", "seeds", "requests", "alpha", "last third",
        *(f"{kind}, last third" for kind in KINDS), "tau, last third", "first own draft after",
        "of their own at the end", "requests they drafted", "requests in their kind's cluster",
        "CPU s of learning per 1,000 requests",
    )  # fmt: skip
    for name, told in TOLD.items():
        found = list(results(rows, POOLS, name).values())
        if not found:
            continue
        ends = [last_third(one["answers"]) for one in found]
        learned_s = over_seeds([cpu_seconds(one["answers"])[1] for one in found])
        cells = [
            over_seeds([pooled_alpha(one["answers"]) for one in found]).text(),
            over_seeds([pooled_alpha(end) for end in ends]).text(),
            *(alpha_of(ends, kind).text() for kind in KINDS),
            over_seeds([pooled_tau(end) for end in ends]).text(2),
            over(found, first_own).text(0), over(found, own_drafts).text(1),
            over(found, own_share).text(2), over(found, match).text(2), learned_s.text(0),
        ]  # fmt: skip
        lines.append(line(told, len(found), len(found[0]["answers"]), *cells))
    return lines if len(lines) > 2 else []


def last_third(answers: Answers) -> Answers:
    """Answers to the last third of the requests, in the order asked."""
    ordered = sorted(answers, key=lambda one: one["number"])
    return ordered[-max(1, len(ordered) // 3) :]


def alpha_of(ends: Sequence[Answers], kind: str) -> Figure:
    found = [of_domain(end, kind) for end in ends]
    return over_seeds([pooled_alpha(some) if some else math.nan for some in found])


def over(found: Sequence[Row], value: Callable[[Row], float]) -> Figure:
    """Over the seeds that have a value."""
    values = [value(one) for one in found]
    return over_seeds([one for one in values if not math.isnan(one)])


def first_own(result: Row) -> float:
    """Requests before the first one that the draft of a class drafted."""
    own = [one["number"] for one in result["answers"] if one["draft"] != LIVE]
    return float(min(own)) if own else math.nan


def own_drafts(result: Row) -> float:
    return float(result.get("drafts", 0))


def own_share(result: Row) -> float:
    """Share of the last third."""
    end = last_third(result["answers"])
    return sum(one["draft"] != LIVE for one in end) / len(end)


def match(result: Row) -> float:
    """Share of the stream's requests that the last clusters sort where most of their kind are; nan
    without clusters."""
    found = result.get("sorted")
    if not found:
        return math.nan
    most = sum(max(counts.get(kind, 0) for counts in found.values()) for kind in KINDS)
    return most / sum(sum(counts.values()) for counts in found.values())


def bound_table(rows: Sequence[Row]) -> list[str]:
    found = list(results(rows, POOLS, BOUND).values())
    if not found:
        return []
    count = found[0]["texts"]
    taught = {
        "static": "-",
        "one": f"{count} x 3",
        "three, as many tokens each": f"{3 * count}",
        "one, from all of these": f"{3 * count} x 3",
    }
    lines = header("drafts, offline", "seeds", "texts of each", *KINDS, "mean", "against the one")
    for name, told in BOUNDS.items():
        values = [one["alphas"][name] for one in found]
        gained = [mean_of(one["alphas"][name]) - mean_of(one["alphas"]["one"]) for one in found]
        cells = [
            *(over_seeds([one[kind] for one in values]).text() for kind in KINDS),
            over_seeds([mean_of(one) for one in values]).text(),
            "-" if name == "one" else over_seeds(gained).text(),
        ]
        lines.append(line(told, len(found), taught.get(name, count), *cells))
    return lines


def mean_of(alphas: dict[str, float]) -> float:
    """Over the kinds, which are as frequent."""
    return sum(alphas[kind] for kind in KINDS) / len(KINDS)


def pools_summary(result: Row) -> Row:
    """The result without single requests."""
    if "answers" not in result:
        return result
    answers = result["answers"]
    end = last_third(answers)
    serving_s, learning_s = cpu_seconds(answers)
    return {name: value for name, value in result.items() if name != "answers"} | {
        "requests": len(answers),
        "alpha": pooled_alpha(answers),
        "alpha_by_kind": {kind: pooled_alpha(of_domain(answers, kind)) for kind in KINDS},
        "alpha_last_third": pooled_alpha(end),
        "alpha_last_third_by_kind": {kind: pooled_alpha(of_domain(end, kind)) for kind in KINDS},
        "tau": pooled_tau(answers),
        "tau_last_third": pooled_tau(end),
        "first_own": None if math.isnan(first_own(result)) else first_own(result),
        "own_share_last_third": own_share(result),
        "match": None if math.isnan(match(result)) else match(result),
        "serving_s_per_1000": serving_s,
        "learning_s_per_1000": learning_s,
    }
