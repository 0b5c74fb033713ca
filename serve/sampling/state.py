"""State of one request's adjustments beyond temperature and filters, and the parts of its text that
they depend on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from draftsmith.serve.sampling.grammar_matcher import GrammarMatcher
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.sampling.request_errors import is_own, sentence


class TokenCounts:
    """U distinct tokens in the order in which they came; penalties read these, never the whole
    vocabulary."""

    def __init__(self, num_prompt: int, device: torch.device):
        self.num_prompt = num_prompt
        self.slots: dict[int, int] = {}  # index of each token in the tensors
        self.ids = torch.zeros(0, dtype=torch.int64, device=device)  # [U]
        # [U] how often in the output
        self.output = torch.zeros(0, dtype=torch.float32, device=device)
        self.prompt = torch.zeros(0, dtype=torch.bool, device=device)  # [U] whether in the prompt
        self._counted = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """`tokens`, the prompt and the output, have grown."""
        begin, self._counted = self._counted, len(tokens)
        new = [token for token in dict.fromkeys(tokens[begin:]) if token not in self.slots]
        if new:
            self.slots.update(zip(new, range(len(self.slots), len(self.slots) + len(new))))
            self.ids = torch.cat([self.ids, torch.tensor(new, device=self.ids.device)])
            self.output = torch.cat([self.output, self.output.new_zeros(len(new))])
            self.prompt = torch.cat([self.prompt, self.prompt.new_zeros(len(new))])
        if begin < self.num_prompt:
            self.prompt[self._indices(tokens[begin : self.num_prompt])] = True
        written = tokens[max(begin, self.num_prompt) :]
        if written:
            indices = self._indices(written)
            self.output.index_add_(0, indices, torch.ones_like(indices, dtype=self.output.dtype))

    def _indices(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([self.slots[token] for token in tokens], device=self.ids.device)


log = logging.getLogger(__name__)


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
        self.bias_ids = torch.tensor(
            [token for token, _ in params.logit_bias], dtype=torch.int64, device=device
        )
        self.bias_values = torch.tensor(
            [bias for _, bias in params.logit_bias], dtype=torch.float32, device=device
        )
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.counts = TokenCounts(num_prompt, device) if penalties != (1.0, 0.0, 0.0) else None
        self.forbidden: torch.Tensor | None = None  # [V] bool, of `allowed_token_ids`
        if params.allowed_token_ids is not None:
            self.forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self.forbidden[torch.tensor(params.allowed_token_ids, device=device)] = False
        self._single = [word[0] for word in params.bad_words if len(word) == 1]
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
        if self.counts is not None:
            self.counts.follow(tokens)
        if self.matcher is not None and len(tokens) > self._matched:
            self.matcher.commit(tokens[self._matched :])
            self._matched = len(tokens)

    def banned(self, prefix: Sequence[int]) -> list[int]:
        """Tokens that a bad word or `min_tokens` bans behind the committed text and `prefix`."""
        banned = self._single.copy()
        if self._longer:
            last = prefix[-1] if prefix else self.tokens[-1]
            banned += [
                word[-1]
                for word in self._longer.get(last, ())
                if self._ends_with(word[:-1], prefix)
            ]
        if len(self.tokens) - self.num_prompt + len(prefix) < self.params.min_tokens:
            banned += self.ends
        return banned

    def _ends_with(self, part: Sequence[int], prefix: Sequence[int]) -> bool:
        text = [*self.tokens[-len(part) :], *prefix]
        return text[-len(part) :] == list(part)


class RowContext(NamedTuple):
    """A distribution to be adjusted: row `row` of the logits, behind a request's committed tokens
    and then `prefix`."""

    row: int
    state: SamplingState
    prefix: list[int]
