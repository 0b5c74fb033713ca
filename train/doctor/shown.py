"""Text of the data as a reader sees it, with the tokens that are trained on marked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


class Marks(NamedTuple):
    """What stands around a stretch of trained tokens."""

    begin: str
    end: str


BRACKETS = Marks("[[", "]]")
COLOUR = Marks("\x1b[30;42m", "\x1b[0m")  # black on green


def marked(input_ids: Sequence[int], loss_mask: Sequence[bool], tokenizer: Decoder, marks: Marks) -> str:
    parts = []
    for is_trained, run in itertools.groupby(zip(input_ids, loss_mask), key=lambda pair: bool(pair[1])):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        parts.append(f"{marks.begin}{text}{marks.end}" if is_trained else text)
    return "".join(parts)


class HarmlessDecoder(NamedTuple):
    """Gives text without characters that could steer a terminal."""

    tokenizer: Decoder

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return "".join(letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text)
