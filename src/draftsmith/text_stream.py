"""Text of committed tokens as it becomes final: no half character, no part of a stop string is ever
released. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

BROKEN = "\ufffd"  # what a decoder shows for bytes that are not a character yet
_PARTS = 3  # tokens that may wait for the rest of a character: it has at most 4 bytes
_KEPT = 8  # tokens kept as context when the window moves on
CONTEXT = _KEPT + 2 * _PARTS  # tokens before a text that its beginning may depend on
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
    whole: int  # tokens of the window whose text ends with a whole character
    base: str  # their text
    given: str  # text of the window that is released or held, or the prompt's
    held: str = ""  # could be the beginning of a stop string


class TextStream:
    """The text of one request, the same however its tokens are cut into pushes. `context` is the
    end of the prompt: some tokenizers drop a leading space without it, and it may end within a
    character.

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
        self._state = self._behind(list(context[-CONTEXT:]))

    def push(self, tokens: Sequence[int]) -> StreamStep:
        early = min(self._unstoppable, len(tokens))
        if early == 0:
            return self._push(tokens)
        self._unstoppable -= early
        first = self._advance(tokens[:early], stoppable=False)
        rest = self._push(tokens[early:]) if early < len(tokens) else StreamStep("", 0, False)
        return StreamStep(first.text + rest.text, early + rest.num_tokens, rest.stopped)

    def _push(self, tokens: Sequence[int]) -> StreamStep:
        before = replace(self._state, window=list(self._state.window))
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
        state, text = self._state, self._decode(self._state.window)
        self._state = _State([], 0, "", "")
        return state.held + text[_num_given(state, text) :]

    def _advance(self, tokens: Sequence[int], *, stoppable: bool = True) -> StreamStep:
        fresh = self._settled(tokens)
        return self._release(self._state, fresh, len(tokens), stoppable=stoppable)

    def _behind(self, context: list[int]) -> _State:
        """State behind a context. The parts of a character that it may end with wait for the
        rest."""
        for parts in range(_PARTS + 1):
            begun = len(context) - parts
            if (kept := self._kept(context[:begun])) is None:
                continue
            self._state = kept
            for token in context[begun:]:
                self._settled([token])
            self._state.given = self._decode(self._state.window)
            return self._state
        text = self._decode(context)
        return _State(context, len(context), text, text)

    def _kept(self, tokens: list[int]) -> _State | None:
        """State of a window of the last tokens; None where no text with an end is found. A window
        that begins within a character may have none: some decoders give up all bytes beside a
        broken one."""
        for count in range(_KEPT, _KEPT + _PARTS + 1):
            text = self._decode(tokens[-count:])
            if (text or count >= len(tokens)) and not text.endswith(BROKEN):
                return _State(tokens[-count:], min(count, len(tokens)), text, text)
        return None

    def _settled(self, tokens: Sequence[int]) -> str:
        """Text that becomes final with the tokens."""
        state = self._state
        text = self._decode([*state.window, *tokens])
        if len(tokens) > 1 and BROKEN in text[len(state.base) :]:
            # What is broken and what only waits shows token by token.
            return "".join([self._settled([token]) for token in tokens])
        state.window += tokens
        if not text.startswith(state.base):
            # Bytes that are no character take those before them along: they are read without.
            del state.window[: state.whole]
            state.whole, state.base, state.given = 0, "", state.given[len(state.base) :]
            text = self._decode(state.window)
        # A trailing run of broken characters may still become one good character.
        settled = text.rstrip(BROKEN)
        if len(state.window) - state.whole > _WINDOW and settled != text:
            return self._give_up(text)
        fresh = settled[_num_given(state, text) :]
        if fresh:
            state.given = settled
        if settled == text:
            self._end_whole(text)
        return fresh

    def _end_whole(self, text: str) -> None:
        state = self._state
        if len(state.window) > _WINDOW:
            if (kept := self._kept(state.window)) is not None:
                self._state = replace(kept, held=state.held)
                return
            if not self._decode(state.window[-_KEPT:]):
                del state.window[-_KEPT:]  # Tokens that have no text are no context.
        state.whole, state.base, state.given = len(state.window), text, text

    def _give_up(self, text: str) -> str:
        """Text of a window whose end has been broken for too long, without the last parts: those
        alone may still become a character."""
        state = self._state
        parts = next(
            (
                parts
                for parts in range(_PARTS, 0, -1)
                if self._decode(state.window[:-parts]) + self._decode(state.window[-parts:]) == text
            ),
            _PARTS,
        )
        whole = self._decode(state.window[:-parts])
        fresh = whole[_num_given(state, text) :]
        self._state = _State(state.window[-parts:], 0, "", "", state.held)
        return fresh

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
            self._state = _State([], 0, "", "")
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


def _num_given(state: _State, text: str) -> int:
    """Characters of the window's text that are given. What the prompt ends with was broken and may
    have become a character."""
    return len(state.given if text.startswith(state.given) else state.given.rstrip(BROKEN))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
