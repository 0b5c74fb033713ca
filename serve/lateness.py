"""What text that the draft has not read yet costs the rounds that draft. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

FADING = 0.995  # a round
MOST = 10.0  # rounds that reading up may seem to take: a stall of the machine is not the price of a draft


@dataclass(slots=True)
class Lateness:
    """Of one load. Where its neighbours do not draft, every round of it that does reads first what they have left: what pays in
    a long stretch of such rounds does not pay in a single one between others. Fading sums, in usual rounds of the same k."""

    rounds: float = 1.0  # one that was not late is taken for granted
    late: float = 0.0

    def add(self, drafted: bool, late: float) -> None:
        """`late`: by how many usual rounds this one was longer. What was too dear long ago is tried again some day, so a round
        that did not draft counts too."""
        self.rounds = 1.0 + FADING * (self.rounds - 1.0) + drafted
        self.late = FADING * self.late + min(late, MOST)

    @property
    def factor(self) -> float:
        """By what the time of rounds that draft has been stretched."""
        return 1.0 + self.late / self.rounds
