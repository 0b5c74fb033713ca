"""A grammar as masks over a target's tokens, by llguidance. Imports it only when a request brings a
grammar."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.errors import UserError
from draftsmith.serve.sampling.grammar import Grammar, GrammarTrials, Unfit, compiled

if TYPE_CHECKING:
    from llguidance import LLMatcher

# llguidance marks "the text may end here" at one token of its own; a model may have several such
# tokens, or none.
END = "<|draftsmith: the grammar may end|>"
KEPT = 64  # compiled grammars
MOST_CHARACTERS = 2**21  # of a grammar
MOST_TOLD = 400  # characters of what is wrong with one


class GrammarCompiler:
    """One a target. Any thread may compile; what comes out belongs to one request."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Collection[int]
    ):
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError(
                "grammar needs a tokenizer.json, which this model has not; leave the grammar out"
            )
        try:
            import llguidance
        except ImportError as error:
            raise UserError(
                "grammar needs llguidance; pip install 'draftsmith[grammar]'"
            ) from error
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        backend.add_special_tokens([END])
        self.end: int = backend.token_to_id(END)
        self.vocab_size, self.eos_token_ids = vocab_size, tuple(eos_token_ids)
        setup = backend.to_str(), max(vocab_size, self.end + 1), self.end
        self._trials = GrammarTrials(*setup)
        self.tokenizer = llguidance.LLTokenizer(setup[0], n_vocab=setup[1], eos_token=setup[2])
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def knows(self, grammar: Grammar) -> bool:
        """True for a grammar that takes no time."""
        return grammar in self._compiled

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A `UserError` for what the library cannot honour to the letter."""
        with self._lock:
            known = self._compiled.pop(grammar, None)
        matcher = known if known is not None else self._checked(grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return GrammarMatcher(self, matcher)

    def _checked(self, grammar: Grammar) -> LLMatcher:
        try:
            if len(grammar.source) > MOST_CHARACTERS:
                raise Unfit(f"it has more than {MOST_CHARACTERS} characters")
            self._trials.check(grammar)
            return compiled(self.tokenizer, grammar)
        except Unfit as error:
            raise _refused(grammar, str(error)) from error


def _refused(grammar: Grammar, reason: str) -> UserError:
    return UserError(
        f"grammar ({grammar.kind}) cannot be honoured: {_told(reason)}; change it or leave it out"
    )


def _told(reason: str) -> str:
    reason = reason.replace("<non-verbose/>", "").partition("<backtrace>")[0]
    told = " ".join(reason.split())
    if len(told) > MOST_TOLD:  # what the library quotes comes before what is wrong with it
        told = f"{told[: MOST_TOLD // 2]} ... {told[-MOST_TOLD // 2 :]}"
    return told


class GrammarFailure(Exception):
    """Failure of the library on a text: one that needs more steps than its limits allow, say."""


class GrammarMatcher:
    """Position of one request in its grammar. Not thread-safe."""

    def __init__(self, compiler: GrammarCompiler, compiled: LLMatcher):
        self._compiler, self._compiled = compiler, compiled
        self._matcher = compiled.deep_copy()
        self._committed: list[int] = []

    def commit(self, tokens: Sequence[int]) -> None:
        """The answer's next tokens, none of which ends it."""
        accepted = self._matcher.try_consume_tokens(list(tokens))
        if error := self._matcher.get_error():
            raise GrammarFailure(_told(error))
        assert accepted == len(tokens), (
            f"token {accepted} of {list(tokens)} left the grammar though its mask forbade it"
        )
        self._committed += tokens

    def masks(self, prefixes: Sequence[Sequence[int]]) -> np.ndarray:
        """[n, V] bool: tokens that may follow the committed text and then each of `prefixes`.

        All true behind a prefix that leaves the grammar or ends the text: that distribution is not
        read. Prefixes that share a beginning are cheapest next to one another.

        Raises:
            GrammarFailure: the library failed behind one of them. Other masks are still available.
        """
        try:
            allowed = self._masks(prefixes)
            if error := self._matcher.get_error():
                raise GrammarFailure(_told(error))
        except Exception:
            # The library stays in error for good, or stands behind some prefix.
            self._matcher = self._compiled.deep_copy()
            self._matcher.try_consume_tokens(self._committed)
            raise
        return allowed

    def _masks(self, prefixes: Sequence[Sequence[int]]) -> np.ndarray:
        words = (self._compiler.tokenizer.vocab_size + 31) // 32
        bits = np.zeros((len(prefixes), words), dtype=np.int32)
        unread = np.zeros(len(prefixes), dtype=bool)
        path: list[int] = []
        for row, prefix in enumerate(prefixes):
            if self._walk(path, prefix) and not self._is_over():
                self._matcher.unsafe_compute_mask_ptr(bits[row].ctypes.data, words * 4)
            else:
                unread[row] = True
        self._matcher.rollback(len(path))
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").astype(bool)
        may_end = allowed[:, self._compiler.end].copy()
        allowed[:, self._compiler.end] = False
        allowed = allowed[:, : self._compiler.vocab_size]
        allowed[:, list(self._compiler.eos_token_ids)] = may_end[:, None]
        allowed[unread] = True
        return allowed

    def tokens_until_end(self, tokens: Sequence[int]) -> int | None:
        """Number of the next `tokens` that complete a text which nothing can follow; None when they
        do not."""
        path: list[int] = []
        found = None
        for count in range(1, len(tokens) + 1):
            if not self._walk(path, tokens[:count]):
                break
            if self._matcher.is_stopped():
                found = count
                break
        self._matcher.rollback(len(path))
        return found

    def _walk(self, path: list[int], prefix: Sequence[int]) -> bool:
        """Goes from behind `path` to behind `prefix`; False when the grammar does not reach it.
        `path` is kept true."""
        shared = 0
        while shared < min(len(path), len(prefix)) and path[shared] == prefix[shared]:
            shared += 1
        if shared < len(path):
            self._matcher.rollback(len(path) - shared)
            del path[shared:]
        path += prefix[shared : shared + self._matcher.try_consume_tokens(list(prefix[shared:]))]
        return len(path) == len(prefix)

    def _is_over(self) -> bool:
        """True when nothing may follow and there is no end-of-sequence token."""
        return self._matcher.is_stopped() and not self._compiler.eos_token_ids
