"""Text of committed tokens as it becomes final: no half character, no part of a stop string is ever
released. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

BROKEN = "\ufffd"  # what a decoder shows for bytes that are not a character yet
_CONTEXT = 8  # tokens kept as context when the window moves on; a character has at most 4 bytes
_WINDOW = 48


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that turns ids into text."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str: ...


class ShowsTokens:
    """A tokenizer whose texts leave out the tokens `hidden`, and no other special ones."""

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int]):
        self.tokenizer, self.hidden = tokenizer, hidden

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """`skip_special_tokens` is of no account."""
        shown = [token for token in token_ids if token not in self.hidden]
        return self.tokenizer.decode(
            shown,
            skip_special_tokens=False,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
        )


class StreamStep(NamedTuple):
    text: str  # released now
    # how many of the pushed tokens count; fewer than pushed when a stop string ended the text
    num_tokens: int
    stopped: bool


@dataclass
class _State:
    window: list[int]
    sent: int  # characters of the window's text that are released or held
    held: str  # could be the beginning of a stop string


class TextStream:
    """The text of one request. `context` is the end of the prompt: some tokenizers drop a leading
    space without it.

    A stop string ends the text only behind the first `min_tokens` tokens, though it may begin among
    them. The text keeps it if `keep_stop`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        keep_stop: bool = False,
    ):
        self.tokenizer, self.stop, self.keep_stop = tokenizer, tuple(stop), keep_stop
        self._unstoppable = min_tokens if stop else 0
        window = list(context[-_CONTEXT:])
        self._state = _State(window, len(self._decode(window)) if window else 0, "")

    def push(self, tokens: Sequence[int]) -> StreamStep:
        early = min(self._unstoppable, len(tokens))
        if early == 0:
            return self._push(tokens)
        self._unstoppable -= early
        first = self._advance(tokens[:early], stoppable=False)
        rest = self._push(tokens[early:]) if early < len(tokens) else StreamStep("", 0, False)
        return StreamStep(first.text + rest.text, early + rest.num_tokens, rest.stopped)

    def _push(self, tokens: Sequence[int]) -> StreamStep:
        before = _State(list(self._state.window), self._state.sent, self._state.held)
        step = self._advance(tokens)
        if not step.stopped or len(tokens) == 1:
            return step
        # The stop string ended somewhere inside: once more, token by token, to find where.
        self._state = before
        text = ""
        for count, token in enumerate(tokens, 1):
            step = self._advance([token])
            text += step.text
            if step.stopped:
                return StreamStep(text, count, True)
        return StreamStep(text, len(tokens), False)

    def finish(self) -> str:
        """Rest of the text that was held back, once no token follows."""
        state = self._state
        rest = state.held + self._decode(state.window)[state.sent :]
        self._state = _State([], 0, "")
        return rest

    def _advance(self, tokens: Sequence[int], *, stoppable: bool = True) -> StreamStep:
        state = self._state
        state.window.extend(tokens)
        text = self._decode(state.window)
        # A trailing run of broken characters may still become one good character.
        settled = len(text.rstrip(BROKEN))
        if len(state.window) > _WINDOW:
            settled = max(settled, len(text) - 1)
        fresh = text[state.sent : settled]
        state.sent = max(state.sent, settled)
        if len(state.window) > _WINDOW:
            unsent = len(text) - state.sent
            state.window = state.window[-_CONTEXT:]
            state.sent = len(self._decode(state.window)) - unsent
        return self._release(state, fresh, len(tokens), stoppable=stoppable)

    def _release(
        self, state: _State, fresh: str, num_tokens: int, *, stoppable: bool
    ) -> StreamStep:
        pending = state.held + fresh
        if not self.stop:
            return StreamStep(pending, num_tokens, False)
        # A stop string that lies wholly in the held text was found when it could not end the text.
        searched = [(stop, max(0, len(state.held) + 1 - len(stop))) for stop in self.stop]
        found = [
            (at, at + len(stop) * self.keep_stop)
            for stop, begin in searched
            if (at := pending.find(stop, begin)) >= 0
        ]
        if found and stoppable:
            state.held, state.window, state.sent = "", [], 0
            _, end = min(found)
            return StreamStep(pending[:end], num_tokens, True)
        held = max(_overlap(pending, stop) for stop in self.stop)
        cut = len(pending) - held
        state.held = pending[cut:]
        return StreamStep(pending[:cut], num_tokens, False)

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        return self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
