"""State of one request's adjustments beyond temperature and filters, and the parts of its text that
they depend on; and failures that concern one request: they end that request alone, with one
sentence to its client."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import sent_tensor
from draftsmith.serve.sampling.grammar_matcher import GrammarMatcher
from draftsmith.serve.sampling.params import SamplingParams

log = logging.getLogger(__name__)
NONE = (1.0, 0.0, 0.0)  # penalties that change nothing
# What the machine cannot do, whichever request meets it first.
_SHARED = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)


class TokenTable:
    """The tokens that a request's biases, bans and penalties concern, each once as they came, in
    one tensor of the host: none of these reads the whole vocabulary. Token 0 is always there.

    Args:
        biases: by token; -inf bans it.
        ends: tokens that are banned while the answer may not end.
        num_prompt: the text is counted from its beginning; None: not at all.
    """

    def __init__(
        self, biases: Mapping[int, float], ends: Collection[int] = (), num_prompt: int | None = None
    ):
        values = {0: 0.0, **dict.fromkeys(ends, 0.0), **biases}
        self._places = dict(zip(values, itertools.count()))
        # [5, W] int64: id, bits of the float64 bias, how often in the output, whether in the
        # prompt, whether it is an end
        self.columns = torch.zeros(5, len(values), dtype=torch.int64)
        self.columns[0] = torch.tensor(list(values))
        self.columns[1] = torch.tensor(list(values.values()), dtype=torch.float64).view(torch.int64)
        self.columns[4, [self._places[token] for token in ends]] = 1
        self._num_prompt, self._counted = num_prompt, 0

    def follow(self, tokens: Sequence[int]) -> None:
        """`tokens`, the prompt and the output, have grown."""
        if self._num_prompt is None:
            return
        begin, self._counted = self._counted, len(tokens)
        new = tokens[begin:]
        if fresh := [token for token in dict.fromkeys(new) if token not in self._places]:
            self._places.update(zip(fresh, itertools.count(len(self._places))))
            more = torch.zeros(len(self.columns), len(fresh), dtype=torch.int64)
            more[0] = torch.tensor(fresh)
            self.columns = torch.cat([self.columns, more], dim=1)
        at = torch.tensor([self._places[token] for token in new], dtype=torch.int64)
        in_prompt = max(self._num_prompt - begin, 0)
        self.columns[3].index_fill_(0, at[:in_prompt], 1)
        self.columns[2].index_add_(0, at[in_prompt:], torch.ones_like(at[in_prompt:]))


class SamplingState:
    """Belongs to the engine's thread once its request is queued; `follow` brings it up to date
    before every round."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        num_prompt: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        matcher: GrammarMatcher | None = None,
        device: torch.device,
    ):
        self.params, self.num_prompt, self.matcher = params, num_prompt, matcher
        self.tokens: list[int] = []  # the request's own list: its prompt and what is committed
        # what its processors or its grammar raised: no position has a token from then on
        self.error = ""
        # What they raised in this round behind drafted tokens: only a text that comes to hold these
        # tokens ends there.
        self.error_behind_drafts = ""
        # Tokens that end the answer: banned until `min_tokens`. No distribution behind them is
        # read.
        self.ends = frozenset(
            params.stop_token_ids if params.ignore_eos else [*eos_token_ids, *params.stop_token_ids]
        )
        self.penalties = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        biases = dict(params.logit_bias)
        biases |= {word[0]: -math.inf for word in params.bad_words if len(word) == 1}
        ends = self.ends if params.min_tokens > 0 else ()
        self.table: TokenTable | None = None
        if biases or ends or self.penalties != NONE:
            counted = None if self.penalties == NONE else num_prompt
            self.table = TokenTable(biases, ends, counted)
        self.forbidden: torch.Tensor | None = None  # [V] bool, of `allowed_token_ids`
        if params.allowed_token_ids is not None:
            forbidden = torch.ones(vocab_size, dtype=torch.bool)
            forbidden[list(params.allowed_token_ids)] = False
            self.forbidden = sent_tensor(device, forbidden)
        # By the token before the last one, so that only words that could be completed now are
        # looked at.
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        for word in params.bad_words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append(word)
        self._matched = num_prompt

    @contextmanager
    def owning(self, what: str, prefix: Sequence[int] = ()) -> Iterator[None]:
        """Keeps a failure within to this request, and one behind drafted tokens (`prefix`) to the
        position behind them."""
        try:
            yield
        except Exception as error:
            if not is_own(error):
                raise
            if prefix:
                self.error_behind_drafts = sentence(what, error)
                return
            self.error = sentence(what, error)
            log.warning("%s; its request ends", self.error)

    def follow(self, tokens: list[int]) -> None:
        self.error_behind_drafts = ""
        with self.owning("what the request asks of its text"):
            self._follow(tokens)

    def _follow(self, tokens: list[int]) -> None:
        self.tokens = tokens
        if self.table is not None:
            self.table.follow(tokens)
        if self.matcher is not None and len(tokens) > self._matched:
            self.matcher.commit(tokens[self._matched :])
            self._matched = len(tokens)

    @property
    def reads_tokens(self) -> bool:
        """True where the host needs the drafted tokens to adjust what comes behind them, or leaves
        no token at all."""
        own = self.matcher is not None or bool(self.params.logits_processors)
        return own or bool(self._longer or self.error)

    @property
    def least_left(self) -> int:
        """Tokens, drafted ones included, that must come before the answer may end; may be below
        0."""
        return self.params.min_tokens - (len(self.tokens) - self.num_prompt)

    def completed(self, prefix: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word behind the committed text and `prefix`."""
        if not self._longer:
            return []
        last = prefix[-1] if prefix else self.tokens[-1]
        return [
            word[-1] for word in self._longer.get(last, ()) if self._ends_with(word[:-1], prefix)
        ]

    def _ends_with(self, part: Sequence[int], prefix: Sequence[int]) -> bool:
        text = [*self.tokens[-len(part) :], *prefix]
        return text[-len(part) :] == list(part)


class RowContext(NamedTuple):
    """A distribution to be adjusted: row `row` of the logits, behind a request's committed tokens
    and then `prefix`."""

    row: int
    state: SamplingState
    prefix: list[int]


def is_own(error: Exception) -> bool:
    """True when an exception in one request's share of a round says nothing about the others."""
    return not isinstance(error, _SHARED)


def sentence(what: str, error: Exception) -> str:
    return f"{what} raised {type(error).__name__}: {' '.join(str(error).split())}"


@dataclass
class LoneFailures:
    """Rounds that ended requests for failures of their own and gave nothing to any other request.

    Several in a row mean a failure common to all requests: a tokenizer that raises for every text,
    say. Requests that adjust their distributions (a grammar, processors, biases, ...)
    do not count, for that may be what raises.
    """

    rounds: int = 0  # since a request last ended as it should
    _failed: bool = False  # in this round
    _served: bool = False

    def failed(self, *, adjusts: bool) -> None:
        self._failed |= not adjusts

    def served(self, *, ended: bool) -> None:
        """A request got its share of a round; `ended`: all of its answer."""
        self._served = True
        if ended:
            self.rounds = 0

    def end_round(self) -> None:
        if self._failed and not self._served:
            self.rounds += 1
        self._failed = self._served = False
