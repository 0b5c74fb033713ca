"""Watch for a published version that turns out worse, on the traffic that it serves, none of which
it was trained on, held out or not.

Live acceptance alone does not show it: it falls as well when the traffic gets harder. Two
comparisons do, each paired by request: what the version was accepted with against what it should
have been (served wrongly), and other versions on the same records: its parent (a gain that did
not last), the static draft, which is the floor however many versions came since, and the version
that the latest rollback left, which is better again once its traffic is back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from draftsmith.distill.buffer.traffic import ServedText, depth_of, without
from draftsmith.distill.config import GateConfig
from draftsmith.distill.gate.gate import Comparison, compare, differences_of
from draftsmith.distill.gate.scoring import Scored, Scorer, score_together
from draftsmith.distill.gate.sequential import Ledger
from draftsmith.distill.publisher import Publisher
from draftsmith.record import sampler_of

# Rules of verification that keep a drafted token at least as often as alpha says; "" is not known.
PREDICTED_RULES = ("", "chain", "block", "tree")


class Earlier(NamedTuple):
    """Version that the live one is compared with."""

    version: int
    scorer: Scorer
    least: float  # gain in alpha that calls for going back to it
    is_displaced: bool = False  # left by a rollback to the live version, and no ancestor of it


@dataclass(frozen=True)
class Watched:
    reason: str  # "" when all is well
    version: int | None  # to return to, where there is a reason and such a version
    is_outdone: bool  # that version scores more, and the live one is served as it scores
    acceptance: float  # share of the offered tokens that the live version really had accepted
    served: Comparison  # real acceptance -> alpha it should have had
    earlier: dict[int, Comparison]  # live -> that version
    evidence: Ledger

    def to_dict(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "acceptance": self.acceptance,
            "alpha_scored": self.served.second,
            "served_gap": self.served.gain,
            "served_evidence": self.evidence.served.value,
            "earlier": {
                str(version): {"gain": one.gain, "evidence": self.evidence.against(version).value}
                for version, one in self.earlier.items()
            },
            "requests": self.served.requests,
        }


class LiveWatch:
    """Live version and the earlier ones that it is compared with, with the scores that they have
    already."""

    def __init__(self, publisher: Publisher, config: GateConfig, live: Scorer):
        self.publisher, self.config = publisher, config
        self.latest: Watched | None = None
        self.begin(live)

    def begin(self, live: Scorer) -> None:
        """Starts again with the live version."""
        self.live = live
        self.displaced: Earlier | None = None
        self.earlier: list[Earlier] | None = None
        self.texts: list[ServedText] = []
        self.num_new = 0  # since the last look

    def take(self, text: ServedText, served_as: str) -> None:
        """Keeps a text that the live version drafted in, in part at least, in the window."""
        if text.is_scorable and any(record.draft_version == served_as for record in text.records):
            self.texts = [*self.texts, text][-self.config.window :]
            self.num_new += 1

    def forget(self, answers: frozenset[str]) -> None:
        self.texts = without(self.texts, answers)
        displaced = [self.displaced] if self.displaced is not None else []
        for one in [*displaced, *(self.earlier or ())]:
            one.scorer.forget(answers)

    def _earlier(self) -> list[Earlier]:
        """Other versions, the parent first. The parent has to be better by `drop`, since learning
        goes on; the floor and a displaced version, as a candidate, by the least gain worth a
        swap."""
        publisher = self.publisher
        floor_version, floor = publisher.open_floor()
        found = []
        if publisher.parent_version is not None and publisher.parent is not None:
            least = self.config.gain if floor is None else self.config.drop
            found.append(Earlier(publisher.parent_version, self.live.of(publisher.parent), least))
        if floor_version is not None and floor is not None:
            found.append(Earlier(floor_version, self.live.of(floor), self.config.gain))
        known = [one.version for one in found]
        if self.displaced is not None and self.displaced.version not in known:
            found.append(self.displaced)
        return found

    def displace(self, version: int, scorer: Scorer) -> None:
        """Compares a version, left by a rollback to the live one, with it from now on."""
        self.displaced = Earlier(version, scorer, self.config.gain, is_displaced=True)
        self.earlier = None

    @property
    def is_due(self) -> bool:
        return self.num_new >= self.config.requests

    def look(self, evidence: Ledger, served_as: str) -> Watched:
        self.num_new = 0
        if self.earlier is None:
            # Read now, not before: a version without requests needs no floor in memory.
            self.earlier = self._earlier()
        depth = depth_of(self.texts)
        self.latest = watch(
            self.live,
            self.earlier,
            self.texts,
            self.config,
            version=served_as,
            max_depth=depth,
            evidence=evidence,
        )
        return self.latest


def watch(
    live: Scorer,
    earlier: Sequence[Earlier],
    texts: Sequence[ServedText],
    config: GateConfig,
    *,
    version: str,
    max_depth: int,
    evidence: Ledger,
) -> Watched:
    """Compares the live version with what it should be accepted with, and with earlier versions.

    `texts` were served by `version`, in part at least. A reason is given only for a loss with
    evidence, to which this look is added. `earlier` begins with the version to return to where this
    one is served wrongly.
    """
    scorers = [live, *(one.scorer for one in earlier)]
    everything = score_together(scorers, texts, max_depth=max_depth)
    agreeing = [index for index, one in enumerate(everything[0]) if one.is_consistent]
    texts = [texts[index] for index in agreeing]
    scored, *others = [[some[index] for index in agreeing] for some in everything]
    now = [one.alpha for one in scored]
    found = {}
    for one, olds in zip(earlier, others, strict=True):
        before = [old.alpha for old in olds]
        found[one.version] = compare(now, before)
        evidence.against(one.version).look(differences_of(texts, now, before))
    kept, should = _served_and_predicted(texts, scored, version)
    served = compare(kept, should)
    evidence.served.look(differences_of(texts, kept, should))
    reason, back, is_outdone = _loss(served, found, earlier, config, evidence)
    return Watched(reason, back, is_outdone, served.first, served, found, evidence)


def _served_and_predicted(
    texts: Sequence[ServedText], scored: Sequence[Scored], version: str
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Per text that `version` drafted: drafted tokens kept, and the least alpha that its
    distributions predict; nothing of the others."""
    ends = [None if is_predicted(text, version) else 0 for text in texts]
    kept = [one.kept[:end] for one, end in zip(scored, ends, strict=True)]
    should = [one.least[:end] for one, end in zip(scored, ends, strict=True)]
    return kept, should


def _loss(
    served: Comparison,
    found: Mapping[int, Comparison],
    earlier: Sequence[Earlier],
    config: GateConfig,
    evidence: Ledger,
) -> tuple[str, int | None, bool]:
    """Reason to leave the live version, the version to return to, and whether that one scores
    more; "" and None without evidence of a loss."""
    # The questions share the error.
    error = config.error / (1 + len(earlier))
    better = [
        one.version
        for one in earlier
        if is_loss(found[one.version], one.least, config)
        and evidence.against(one.version).value * error >= 1
    ]
    if is_loss(served, config.drop, config) and evidence.served.value * error >= 1:
        reason = (
            f"served alpha is {served.gain:.3f} below what the same draft scores on the same "
            "records"
        )
        ancestors = [one.version for one in earlier if not one.is_displaced]
        return reason, ancestors[0] if ancestors else None, False
    if better:
        back = max(better, key=lambda one: found[one].gain)
        gain = found[back].gain
        reason = f"the alpha of version {back} is {gain:.3f} higher on the newest records"
        return reason, back, True
    return "", None, False


def is_predicted(text: ServedText, version: str) -> bool:
    """True where alpha says how often the text's drafted tokens were kept: all of `version`, since
    a request that began before has keys and values of another draft, drawn as the score takes it,
    and verified losslessly."""
    return all(
        record.draft_version == version
        and sampler_of(record) != "tempered"
        and record.rule in PREDICTED_RULES
        for record in text.records
        if record.drafted
    )


def is_loss(comparison: Comparison, least: float, config: GateConfig) -> bool:
    return comparison.requests >= config.requests and comparison.gain > least
