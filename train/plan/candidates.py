"""Candidates of a plan: every family in one or two shapes, or the shape that was asked for; and
each candidate with its cost, times and forecasts once it was run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from draftsmith.config import to_dict
from draftsmith.drafters.options import OPTIONS, DrafterOptions, DraftLmOptions, Eagle3Options
from draftsmith.errors import UserError
from draftsmith.train.plan.config import PlanConfig
from draftsmith.train.plan.costs import Cost
from draftsmith.train.plan.expected import Expectation
from draftsmith.train.plan.forecast import Forecast, best, forecast
from draftsmith.train.plan.timing import RoundTimes
from draftsmith.train.plan.trees import TreeForecast

COVERAGE = 0.99  # of the target's tokens, that a reduced draft vocabulary must hold
VOCABULARY_STEP = 256


class Candidate(NamedTuple):
    family: str
    options: DrafterOptions
    coverage: float = 1.0  # share of the target's tokens in the draft's vocabulary
    draft: str = ""  # the trained draft that it is, where several of its family are given

    @property
    def overrides(self) -> list[str]:
        """Options that differ from the family's defaults, as `draftsmith train` takes them."""
        defaults, key = to_dict(OPTIONS[self.family]()), self.family.replace("-", "_")
        chosen = {
            name: value for name, value in to_dict(self.options).items() if value != defaults[name]
        }
        return [f"{key}.{name}={text_of(value)}" for name, value in chosen.items()]

    @property
    def name(self) -> str:
        options = [override.split(".", 1)[1] for override in self.overrides]
        return " ".join([self.family, *options, *([f"({self.draft})"] if self.draft else [])])


def text_of(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def candidates(
    config: PlanConfig,
    trained: Mapping[str, Mapping[str, DrafterOptions]],
    *,
    num_layers: int,
    token_counts: torch.Tensor | None,
) -> list[Candidate]:
    """Drafts to plan for.

    Args:
        trained: by family and name, the shapes of drafts of known acceptance, which holds for no
            other shape of the family.
        token_counts: [V] occurrences of each token in what the target wrote.
    """
    for family in config.families:
        if family not in OPTIONS:
            raise UserError(f"--families names {family!r}; known ones are {', '.join(OPTIONS)}")
    found, given = [], config.by_family()
    for family in config.families or OPTIONS:
        drafts = trained.get(family, {})
        if (asked := given[family]) is not None:
            found.append(Candidate(family, asked))
        elif drafts:
            several = len(drafts) > 1
            found += [
                Candidate(family, options, draft=name if several else "")
                for name, options in drafts.items()
            ]
        else:
            # Layers of an offloaded target are nowhere to be copied from.
            copied = 0 if config.target_offload else num_layers
            found += list(shapes(family, copied, token_counts))
    return found


def shapes(family: str, num_layers: int, token_counts: torch.Tensor | None) -> Iterator[Candidate]:
    yield Candidate(family, OPTIONS[family]())
    if family == "draft-lm" and num_layers > 2:
        # The first and the last layer of the target, which learn sooner than new ones.
        yield Candidate(family, DraftLmOptions(target_layers=(0, num_layers - 1)))
    reduced = (
        reduced_vocabulary(token_counts)
        if family == "eagle3" and token_counts is not None
        else None
    )
    if reduced is not None:
        yield Candidate(
            family, Eagle3Options(draft_vocab_size=reduced), coverage_of(token_counts, reduced)
        )


def reduced_vocabulary(token_counts: torch.Tensor) -> int | None:
    """The smallest vocabulary of the most frequent tokens that covers nearly all of the text; None
    where it saves little."""
    shares = token_counts.sort(descending=True).values.double().cumsum(0) / token_counts.sum()
    needed = int((shares < COVERAGE).sum()) + 1
    rounded = -(-needed // VOCABULARY_STEP) * VOCABULARY_STEP
    return rounded if rounded <= len(token_counts) // 2 else None


def coverage_of(token_counts: torch.Tensor, size: int) -> float:
    return float(token_counts.sort(descending=True).values[:size].sum() / token_counts.sum())


class Planned(NamedTuple):
    candidate: Candidate
    cost: Cost
    times: dict[int, RoundTimes]  # by the number of streams; none of an offloaded target
    expectation: Expectation | None  # None where nothing is known of its acceptance
    taps: tuple[int, ...]
    trees: dict[int, list[TreeForecast]]  # by the number of streams; of measured shapes
    # weights, keys and values of all streams at full context, and buffers of the draft
    serve_memory_bytes: int

    def forecasts(self, streams: int) -> list[Forecast]:
        """One per draft length; none without an expectation or times."""
        if self.expectation is None or streams not in self.times:
            return []
        coverage = self.candidate.coverage
        return [
            forecast(k, cost, self.expectation.tau(k, coverage))
            for k, cost in self.times[streams].cost.items()
        ]

    def best(self, streams: int) -> Forecast | None:
        forecasts = self.forecasts(streams)
        return best(forecasts) if forecasts else None
