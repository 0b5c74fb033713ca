"""Expected acceptance of a draft before one is trained: published figures, or none.

Acceptance depends on text, target, data and time far more than on anything here, so the ranges are
wide. `--alpha` and `--draft` replace them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from draftsmith.config import build
from draftsmith.drafters.checkpoint import draft_sampling_of
from draftsmith.drafters.options import OPTIONS, DrafterOptions
from draftsmith.errors import UserError
from draftsmith.train.plan.forecast import Spread, alpha_of, tau_of


class Expectation(NamedTuple):
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]  # alpha at each depth; the last one goes on
    source: str
    trees: tuple[tuple[str, Spread], ...] = ()  # shape and tau of each tree that was measured

    def tau(self, k: int, coverage: float = 1.0) -> Spread:
        """Expected tau at draft length `k`. `coverage` is the share of the target's tokens in the
        draft's vocabulary, which bounds what is kept."""
        taus = [
            tau_of([alpha * coverage for alpha in alphas], k)
            for alphas in (self.middle, self.low, self.high)
        ]
        return Spread(*taus)


class Published(NamedTuple):
    """Least and greatest tau over the benchmark sets of one table."""

    k: int
    least: float
    greatest: float
    source: str


# Chains only; trees keep more and are not comparable.
PUBLISHED = {
    "eagle3": Published(7, 2.66, 5.30, "Qwen3-8B, chains of 7, T=1: MT-bench to GSM8K (DeepSpec)"),
    "dspark": Published(7, 3.72, 6.17, "Qwen3-8B, chains of 7, T=1: MT-bench to GSM8K (DeepSpec)"),
    "dflash": Published(
        15, 4.03, 5.14, "Qwen3-8B, blocks of 16, vLLM: code and mathematics (ModelOpt)"
    ),
    "p-eagle": Published(5, 2.68, 3.55, "gpt-oss-120b, k = 5, vLLM: MT-bench to GSM8K (P-EAGLE)"),
}


def published(family: str) -> Expectation | None:
    if family not in PUBLISHED:
        return None
    k, least, greatest, source = PUBLISHED[family]
    low, high = alpha_of(least, k), alpha_of(greatest, k)
    return Expectation((low,), ((low + high) / 2,), (high,), source)


def stated(words: Sequence[str], families: Sequence[str]) -> dict[str, Expectation]:
    """["eagle3:0.7,0.6"] as expectations without a range."""
    found = {}
    for word in words:
        family, _, numbers = word.partition(":")
        try:
            alphas = tuple(float(number) for number in numbers.split(","))
        except ValueError:
            alphas = ()
        if family not in families or not alphas or not all(0 <= alpha <= 1 for alpha in alphas):
            raise UserError(
                f"--alpha {word!r} is not FAMILY:ALPHA[,ALPHA...]; write for example "
                "eagle3:0.75,0.7"
            )
        found[family] = Expectation(alphas, alphas, alphas, "given with --alpha")
    return found


def recorded(
    record: Mapping[str, Any], temperature: float, name: str, *, draft_sampling: str = "sampled"
) -> Expectation:
    """Acceptance recorded by `draftsmith eval --store` with a draft; its alphas are those of a
    round, conditional and in order."""
    drafts = f" with {draft_sampling} drafts" if temperature > 0 else ""
    for evaluation in record.get("evaluation") or []:
        is_alike = temperature == 0 or draft_sampling_of(evaluation) == draft_sampling
        if evaluation["temperature"] == temperature and is_alike:
            alphas = [alpha for alpha in evaluation["alpha"] if alpha is not None]
            low, middle, high = (
                tuple(alpha[key] for alpha in alphas) for key in ("low", "value", "high")
            )
            return Expectation(
                low,
                middle,
                high,
                f"measured on {evaluation['tokens']} tokens{drafts} ({name})",
                measured_trees(evaluation),
            )
    raise UserError(
        f"draft {name!r} has no acceptance recorded at temperature {temperature:g}{drafts}; run "
        f"draftsmith eval --store --draft-sampling {draft_sampling}"
    )


def measured_trees(evaluation: Mapping[str, Any]) -> tuple[tuple[str, Spread], ...]:
    """Shapes and figures that `draftsmith eval --tree --store` recorded."""
    return tuple(
        (one["tree"], Spread(*(one["tau"][key] for key in ("value", "low", "high"))))
        for one in evaluation.get("trees") or []
    )


def trained_shape(record: Mapping[str, Any]) -> DrafterOptions:
    """The shape that `draftsmith train` wrote into the record; the family's default for a draft
    made elsewhere."""
    family = record["family"]
    config = (record.get("training") or {}).get("config") or {}
    return build(OPTIONS[family], config.get(family.replace("-", "_")) or {})
