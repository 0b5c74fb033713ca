"""The live view of `serve --dashboard-text`: the tokens of the latest rounds, as accepted, rejected
and the target's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from draftsmith.serve.requests.request import Request
from draftsmith.text_stream import CONTEXT, ShowsTokens, TextStream, Tokenizer

KEPT = 512  # rounds of requests


class ShownRound(NamedTuple):
    number: int
    request: str
    request_class: str
    before: tuple[int, ...]  # so that a piece is decoded as it is inside its text
    accepted: tuple[int, ...]  # drafted, kept and committed
    rejected: tuple[int, ...]  # drafted and not kept
    own: tuple[int, ...]  # the target's: the residual or bonus token


class TextView:
    """The latest rounds. `add_round` runs on the engine's thread and keeps a few small tuples; they
    are decoded only when the page asks for them."""

    def __init__(self) -> None:
        self._rounds = deque[ShownRound](maxlen=KEPT)
        self._count = 0

    def add_round(
        self, request: Request, chain: Sequence[int], accepted: int, committed: Sequence[int]
    ) -> None:
        """Add one request's share of a round, after it was committed. A request that keeps out of
        learning is never shown."""
        if not request.options.learn or not committed:
            return
        begin = len(request.tokens) - len(committed)
        self._count += 1
        self._rounds.append(
            ShownRound(
                self._count,
                request.id,
                request.acceptance_class,
                tuple(request.tokens[max(0, begin - CONTEXT) : begin]),
                tuple(committed[:accepted]),
                tuple(chain[accepted:]),
                tuple(committed[accepted:]),
            )
        )

    def after(self, number: int) -> list[ShownRound]:
        """Rounds after the round `number` that are still kept."""
        return [one for one in list(self._rounds) if one.number > number]


def pieces(shown: ShownRound, vocabulary: Tokenizer) -> dict[str, Any]:
    """The round as text. `rejected` goes on where `accepted` ends, and so does `target`."""
    kept = [*shown.before, *shown.accepted]
    return {
        "number": shown.number,
        "request": shown.request,
        "request_class": shown.request_class,
        "accepted": _continuation(vocabulary, shown.before, shown.accepted),
        "rejected": _continuation(vocabulary, kept, shown.rejected),
        "target": _continuation(vocabulary, kept, shown.own),
    }


def _continuation(vocabulary: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    # Half a character is left to the round that completes it.
    return TextStream(ShowsTokens(vocabulary, ()), context=before).push(tokens).text
