"""Likeliest tokens by an OpenAI-compatible server that gives no states: `prompt_logprobs` of
completions, as vLLM has them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.remote.connection import Connection, Refused, in_background
from draftsmith.drafters.target.segments import stretches_of
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.top_tokens import TopProbs

COMPLETIONS_PATH = "/v1/completions"
MODELS_PATH = "/v1/models"
AT_ONCE = 32  # requests; the server batches them


class Asked(NamedTuple):
    texts: list[list[int]]
    top: int


class PromptLogprobs:
    """Likeliest tokens after each token of a text, one request a text. `vocab_size` is the
    target's."""

    def __init__(self, connection: Connection, vocab_size: int):
        self.connection, self.vocab_size = connection, vocab_size
        self._room = threading.BoundedSemaphore(AT_ONCE)
        self._ahead: tuple[Asked, Future[TopProbs]] | None = None
        listed = connection.json("GET", MODELS_PATH)
        try:
            self.model = str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"target server {connection.base} lists no model at {MODELS_PATH}; check the URL"
            ) from error

    def likeliest(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        segments: torch.Tensor | None,
        top: int,
    ) -> TopProbs:
        """As `RemoteTarget.likeliest`. Nothing is known after the last token of a text: all mass is
        in the tail there."""
        asked = _asked(input_ids, attention_mask, segments, top)
        if self._ahead is not None and self._ahead[0] == asked:
            ahead, self._ahead = self._ahead[1], None
            found = ahead.result()
        else:
            found = self._found(asked)
        return TopProbs(*(part.to(input_ids.device) for part in found))

    def expect(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        taps: Sequence[int],
        segments: torch.Tensor | None = None,
        *,
        top: int = 0,
    ) -> None:
        """Asks for what `likeliest` will be called for, and does not wait. There are no `taps`."""
        asked = _asked(input_ids, attention_mask, segments, top)
        self._ahead = asked, in_background(partial(self._found, asked))

    def _found(self, asked: Asked) -> TopProbs:
        size = min(AT_ONCE, len(asked.texts))  # threads
        shares = [
            in_background(partial(self._of_each, asked.texts[first::size], asked.top))
            for first in range(size)
        ]
        found = [share.result() for share in shares]
        in_order = [found[at % size][at // size] for at in range(len(asked.texts))]
        return TopProbs(*map(torch.cat, zip(*in_order, strict=True)))

    def _of_each(self, texts: Sequence[list[int]], top: int) -> list[TopProbs]:
        return [self._of(text, top) for text in texts]

    def _of(self, text: list[int], top: int) -> TopProbs:
        body = {
            "model": self.model,
            "prompt": text,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top,
        }
        try:
            with self._room:
                answer = self.connection.json("POST", COMPLETIONS_PATH, body)
        except Refused as error:
            if error.status != 400:
                raise
            raise UserError(
                f"{error}; start vLLM with --max-logprobs {top} or more, and give a max_length "
                "below its --max-model-len"
            ) from error
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            rows = [_sorted(entry) for entry in entries[1:]]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"target server {self.connection.base} gives neither states nor prompt_logprobs; "
                "give the URL of draftsmith serve --states-max-tokens, or of vLLM"
            ) from error
        return self._joined(rows, len(text), min(top, self.vocab_size))

    def _joined(
        self, rows: Sequence[Sequence[tuple[int, float]]], length: int, top: int
    ) -> TopProbs:
        if len(rows) != length - 1 or any(len(row) < top for row in rows):
            raise UserError(
                f"target server {self.connection.base} gives fewer than {top} prompt_logprobs at "
                "some position; give a smaller target_logprobs"
            )
        ids = torch.zeros(length, top, dtype=torch.int64)
        logprobs = torch.full((length, top), -torch.inf)
        for at, row in enumerate(rows):
            ids[at] = torch.tensor([token for token, _ in row[:top]])
            logprobs[at] = torch.tensor([value for _, value in row[:top]])
        if int(ids.max()) >= self.vocab_size:
            raise UserError(
                f"target server {self.connection.base} knows a token {int(ids.max())} and the "
                f"target has {self.vocab_size}; give --target the model that it serves"
            )
        return TopProbs(ids, logprobs, (1 - logprobs.exp().sum(dim=-1)).clamp(min=0))


def _asked(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    segments: torch.Tensor | None,
    top: int,
) -> Asked:
    numbers = attention_mask - 1 if segments is None else segments
    texts = [
        input_ids[row, begin:end].tolist()
        for row, stretches in enumerate(stretches_of(numbers))
        for begin, end, is_text in stretches
        if is_text
    ]
    return Asked(texts, top)


def _sorted(entry: dict[str, Any]) -> list[tuple[int, float]]:
    """(token, logprob), the likeliest first. The prompt's own token is among them also where it is
    less likely than those that were asked for."""
    pairs = [(int(token), float(found["logprob"])) for token, found in entry.items()]
    return sorted(pairs, key=lambda pair: -pair[1])
