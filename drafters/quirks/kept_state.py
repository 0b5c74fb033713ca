"""The state that a text keeps from round to round. Torch-free.

A state cannot be rolled back. So a round reads the known tokens first, keeps the state after them,
and reads its drafted tokens from a copy. If all of these are accepted, the copy is kept in place of
the other. If not, the accepted ones are read again by the next round.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_SIDES = 2  # slots of a text: the kept state, and the one after the drafted tokens


def num_kept(num_known: int, num_drafted: int, *, is_start: bool, no_single: bool) -> int:
    """Number of a round's known tokens that the kept state reads, from the first on.

    All of them; but where a layer may not read a single token after a state (`no_single`), one or
    two are left for the drafted tokens' piece and for the next round, and a token alone too.
    """
    if not no_single:
        return num_known
    count = num_known - (1 if num_drafted else 2)
    return count if count >= (1 if is_start else 2) else 0


@dataclass(slots=True)
class KeptState:
    behind: int = 0  # tokens at the end of the text's cache that the kept state has not read
    side: int = 0  # which of the two slots is kept

    def slot(self, owner: int) -> int:
        """Slot of the kept state of text number `owner`."""
        return NUM_SIDES * owner + self.side

    def slot_ahead(self, owner: int) -> int:
        """Slot of the state after the drafted tokens."""
        return NUM_SIDES * owner + 1 - self.side

    def verified(self, left: int, drafted: int, accepted: int) -> None:
        """Moves on after a round whose kept state has left out `left` of its known tokens."""
        if left > 0 or accepted < drafted:
            self.behind = left + accepted
            return
        self.behind = 0
        if drafted > 0:
            self.side = 1 - self.side
