"""Masking of tokens that must not be stored or learned from, before a record leaves the server's
process.

A hook reads the text of a whole request and names the parts to mask, so a request's records are
held until its last one. Their tokens become `mask_id` and are never trained on. Everything before
the first masked token is kept. Behind it only tokens are kept, since a distribution whose context
is masked could reveal the masked text.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from draftsmith.errors import UserError
from draftsmith.record import NOTHING, RoundRecord
from draftsmith.text_stream import TextStream, Tokenizer

logger = logging.getLogger("draftsmith.buffer")

# Requests that are held at once; beyond it the oldest one is dropped.
MAX_HELD = 4096
# text -> (begin, end) of what to mask, in characters
Hook = Callable[[str], Iterable[tuple[int, int]]]


def load_hook(reference: str) -> Hook:
    module, _, name = reference.partition(":")
    try:
        hook = vars(importlib.import_module(module))[name]
    except (ImportError, KeyError, ValueError) as error:
        raise UserError(
            f"redact is {reference!r}, which cannot be loaded ({error}); give module:function"
        ) from error
    if not callable(hook):
        raise UserError(f"redact is {reference!r}, which is no function; give module:function")
    return hook


def mask_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Token that replaces masked tokens."""
    named = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in named if token is not None)


class Redactor:
    """Screen of `BufferWriter`. A hook that fails costs the records of its request, never the
    request."""

    def __init__(self, hook: Hook, tokenizer: Tokenizer, *, mask_id: int):
        self.hook, self.tokenizer, self.mask_id = hook, tokenizer, mask_id
        self.failed = 0
        self._held: dict[str, list[RoundRecord]] = {}

    @property
    def num_held(self) -> int:
        """Records that wait for the last one of their requests."""
        return sum(map(len, self._held.values()))

    def __call__(self, record: RoundRecord) -> list[RoundRecord]:
        self._held.setdefault(record.request, []).append(record)
        if not record.last:
            if len(self._held) > MAX_HELD:
                del self._held[next(iter(self._held))]
            return []
        records = self._held.pop(record.request)
        if [one.round for one in records] != list(range(len(records))):
            # A record was dropped: what the hook would see is not the text.
            return []
        try:
            return self._redacted(records)
        except Exception:
            # The hook is foreign code, which may raise anything.
            if self.failed == 0:
                logger.exception("the redaction hook failed; records of such requests are dropped")
            self.failed += 1
            return []

    def _redacted(self, records: list[RoundRecord]) -> list[RoundRecord]:
        tokens = [token for record in records for token in (*record.context, *record.committed)]
        ends = text_ends(tokens, self.tokenizer)
        masked = masked_tokens(ends.ends, self.hook(ends.text))
        first = (
            masked.index(True)
            if True in masked
            else len(tokens) + max(len(record.drafted) for record in records)
        )
        at, kept = 0, []
        for record in records:
            mine = masked[at : at + len(record.context) + len(record.committed)]
            at += len(mine)
            # A rejected draft may reach further than the text does.
            intact = max(at, record.position + len(record.drafted)) <= first
            kept.append(record if intact else self._masked(record, mine))
        # Which rounds keep their distributions depends on what was emitted in them: no evidence of
        # how they were verified.
        return [replace(record, rule="") for record in kept]

    def _masked(self, record: RoundRecord, masked: Sequence[bool]) -> RoundRecord:
        context, committed = (
            [self.mask_id if hidden else token for token, hidden in zip(tokens, flags, strict=True)]
            for tokens, flags in (
                (record.context, masked[: len(record.context)]),
                (record.committed, masked[len(record.context) :]),
            )
        )
        if any(masked[len(record.context) :]):
            # Context is not trained on.
            context, committed = context + committed, []
        kept = min(record.accepted, len(committed))
        return replace(
            record,
            position=record.position + len(record.committed) - len(committed),
            context=context,
            drafted=committed[:kept],
            accepted=kept,
            committed=committed,
            emitted=committed[-1] if committed else -1,
            p=NOTHING,
            q=NOTHING,
            taps=None,
        )


class Ends(NamedTuple):
    """Text and the end of each token in it. Tokens that are part of a character end where it
    begins."""

    text: str
    ends: list[int]


def text_ends(tokens: Sequence[int], tokenizer: Tokenizer) -> Ends:
    stream, pieces = TextStream(tokenizer), []
    for token in tokens:
        pieces.append(stream.push([token]).text)
    ends = list(itertools.accumulate(map(len, pieces)))
    return Ends("".join(pieces) + stream.finish(), ends)


def masked_tokens(ends: Sequence[int], spans: Iterable[tuple[int, int]]) -> list[bool]:
    """Mask of the tokens with a character in one of the spans. A token without a character goes
    with the next that has one."""
    begins = [0, *ends[:-1]]
    chosen = [(int(begin), int(end)) for begin, end in spans]
    masked = [False] * len(ends)
    # a broken character at the very end
    hit = any(end > (ends[-1] if ends else 0) for _, end in chosen)
    for index in range(len(ends) - 1, -1, -1):
        if ends[index] > begins[index]:
            hit = any(begin < ends[index] and end > begins[index] for begin, end in chosen)
        masked[index] = hit
    return masked
