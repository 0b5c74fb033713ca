"""Detection of a drop in a class's live acceptance, one number per request.

Under a version the first requests of a class set its level. From then on a bet is made on each
request that it is accepted less, c (level - x) to win with x the accepted share of its offered
tokens. While the class keeps its level, no bet gains on average. New money of 1 is staked at every
request and left in the game (Shiryaev and Roberts), so that the sum grows by one per request on
average and passes a threshold no sooner, on average, than after so many requests. The threshold is
thus the requests per hour over the false alarms per hour that are allowed, whatever the
distribution of x. Requests, not rounds: rounds of a request resemble each other.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import DriftConfig

BASELINE = 64  # requests that set a class's level
MAX_CLASSES = 64  # the one not seen for longest is forgotten
RATE_OVER = 1024  # latest requests that give the rate per hour
THRESHOLDS = (20.0, 1e9)
# Of the largest bet that cannot lose more than there is.
BETS = (0.15, 0.45, 0.9)


@dataclass(frozen=True)
class Alarm:
    request_class: str  # with the choice of drafted tokens, where there are several
    level: float  # acceptance before
    now: float  # since the most likely moment of the change
    requests: int  # from that moment to the alarm

    def describe(self) -> str:
        name = f"class {self.request_class!r}" if self.request_class else "traffic"
        return (
            f"{name} is accepted {self.now:.3f} in its latest {self.requests} requests, "
            f"{self.level:.3f} before"
        )


@dataclass
class ClassDetector:
    """One class under one version."""

    drop: float  # a loss that is not worth an alarm
    first: list[float] = field(default_factory=list)  # until they are enough for a level
    level: float = math.nan
    bound: float = math.nan  # what x exceeds on average while nothing changed
    money: list[float] = field(default_factory=lambda: [0.0] * len(BETS))
    since: list[float] = field(default_factory=list)  # x from the most likely moment of a change on

    def observe(self, x: float, threshold: float) -> tuple[float, int] | None:
        """Returns (mean, count) of the requests since the change, at the alarm."""
        if math.isnan(self.level):
            self._set_level(x)
            return None
        stake = [bet / (1 - self.bound) * (self.bound - x) for bet in BETS]
        self.money = [(held + 1) * (1 + won) for held, won in zip(self.money, stake, strict=True)]
        value = sum(self.money) / len(BETS)
        # While the sum is about what was staked, nothing has begun.
        self.since = [*self.since, x][-BASELINE * 8 :] if value > 2 else [x]
        return (sum(self.since) / len(self.since), len(self.since)) if value >= threshold else None

    def _set_level(self, x: float) -> None:
        self.first.append(x)
        if len(self.first) < BASELINE:
            return
        self.level = sum(self.first) / BASELINE
        spread = math.sqrt(sum((one - self.level) ** 2 for one in self.first) / (BASELINE - 1))
        # The level is itself measured: three standard errors of it are no change.
        self.bound = self.level - max(self.drop, 3 * spread / math.sqrt(BASELINE))
        self.first = []


class Drift:
    """Detectors of all classes under the live version, and the rest of a learner without gains."""

    def __init__(self, config: DriftConfig):
        self.config = config
        self.fruitless = 0  # decisions since the last promotion or alarm
        self._detectors: OrderedDict[str, ClassDetector] = OrderedDict()
        self._times_s: deque[float] = deque(maxlen=RATE_OVER)

    @property
    def is_resting(self) -> bool:
        return 0 < self.config.patience <= self.fruitless

    def new_version(self) -> None:
        """Sets levels anew, since another draft has another acceptance."""
        self._detectors.clear()
        self.fruitless = 0

    def count_decision(self, *, promoted: bool) -> bool:
        """Counts a decision of the gate. Returns True when learning rests from now on."""
        was_resting = self.is_resting
        self.fruitless = 0 if promoted else self.fruitless + 1
        return self.is_resting and not was_resting

    def observe(self, text: ServedText, version: str) -> Alarm | None:
        """Returns an alarm, which ends the rest of a learner; its class then gets a new level."""
        x = acceptance(text, version)
        if x is None:
            return None
        self._times_s.append(text.records[-1].time_s)
        name = text.group
        detector = self._detectors.pop(name, None) or ClassDetector(self.config.drop)
        was_new = math.isnan(detector.level)
        found = detector.observe(x, self.threshold())
        if was_new and not math.isnan(detector.level):
            # a class that has only now become frequent may have something to teach
            self.fruitless = 0
        if found is None:
            self._detectors[name] = detector
            while len(self._detectors) > MAX_CLASSES:
                self._detectors.popitem(last=False)
            return None
        self.fruitless = 0
        return Alarm(name, detector.level, *found)

    def threshold(self) -> float:
        """Threshold of each class, such that all classes together give as many false alarms as
        allowed: each adds its requests over this."""
        low, high = THRESHOLDS
        hours = (max(self._times_s) - min(self._times_s)) / 3600 if self._times_s else 0.0
        if hours <= 0:
            return high
        return min(high, max(low, len(self._times_s) / hours / self.config.false_alarms))

    def kept(self) -> dict[str, Any]:
        """Values that a restart needs to go on."""
        classes = {name: asdict(one) for name, one in self._detectors.items()}
        return {"fruitless": self.fruitless, "times_s": list(self._times_s), "classes": classes}

    def restore(self, kept: Mapping[str, Any]) -> None:
        self.fruitless = kept["fruitless"]
        self._times_s.extend(kept["times_s"])
        for name, one in kept["classes"].items():
            self._detectors[name] = ClassDetector(**{**one, "drop": self.config.drop})

    def to_dict(self) -> dict[str, dict[str, float]]:
        return {
            name: {
                "level": one.level,
                "now": sum(one.since) / len(one.since),
                "evidence": sum(one.money) / len(BETS),
            }
            for name, one in self._detectors.items()
            if one.since
        }


def acceptance(text: ServedText, version: str) -> float | None:
    """Share of the tokens offered by `version`, of those whose prefix was accepted, that were
    accepted; None where it offered none."""
    rounds = [
        record for record in text.records if record.drafted and record.draft_version == version
    ]
    reached = sum(min(record.accepted + 1, len(record.drafted)) for record in rounds)
    return sum(record.accepted for record in rounds) / reached if reached else None
