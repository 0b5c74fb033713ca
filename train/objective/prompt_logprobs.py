"""Likeliest tokens after each token of a text, by the `prompt_logprobs` of an engine that has the
target, as vLLM gives them.

A server that is away is waited for; what it refuses is raised at once.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import httpx
import torch

from draftsmith.client import VARIABLE, base_of, bearer, message_of
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.target.packed_pass import stretches_of
from draftsmith.errors import UserError, first_line
from draftsmith.kernels.sampling.top_tokens import TopProbs
from draftsmith.train.objective.teacher import TargetSignals

log = logging.getLogger(__name__)

Found = TypeVar("Found")

COMPLETIONS_PATH = "/v1/completions"
MODELS_PATH = "/v1/models"
AT_ONCE = 32  # requests; the server batches them
# A server that says 500 may be ending, as vLLM does without its engine.
AWAY = (408, 409, 425, 429, 500, 502, 503, 504)
CONNECT_S = 10.0
READ_S = 600.0  # a pass over long texts, behind those of others
WAIT_S = 120.0  # for a server that is away
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
GO_ON = "start it, then the same command again, which goes on from what it saved"


class PatientServer:
    """Kept connections to one server, which is waited for while it is away. May be used by several
    threads. `option` names the URL."""

    def __init__(
        self,
        url: str,
        option: str,
        *,
        api_key: str | None = None,
        wait_s: float = WAIT_S,
        pause_s: float = FIRST_PAUSE_S,
        transport: httpx.BaseTransport | None = None,
    ):
        self.base = base_of(url, option)
        self.wait_s, self.pause_s = wait_s, pause_s
        self._told_s = float("-inf")
        self.http = httpx.Client(
            base_url=self.base,
            headers=bearer(api_key),
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
        )

    def first_model(self, mend: str = "check the URL") -> str:
        """Name of the model that the server lists first."""
        listed = self.ask("GET", MODELS_PATH)
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"server {self.base} lists no model at {MODELS_PATH}; {mend}"
            ) from error

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """JSON of the answer, for which it asks until there is one, for `wait_s` at most from the
        first failure."""
        failed_s: float | None = None
        pause_s = self.pause_s
        while True:
            try:
                return self._once(method, path, body)
            except (httpx.HTTPError, Away) as error:
                now_s = time.monotonic()
                failed_s = now_s if failed_s is None else failed_s
                said = f"server {self.base} does not answer ({first_line(error)})"
                if now_s - failed_s + pause_s > self.wait_s:
                    raise UserError(f"{said}; {GO_ON}") from error
                if now_s - self._told_s > self.wait_s:  # once for all threads
                    self._told_s = now_s
                    log.warning("%s; waiting for it, %g s at most", said, self.wait_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _once(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"content-type": "application/json"}
        response = self.http.request(method, path, content=content, headers=headers)
        if response.status_code == 401:
            raise UserError(f"server {self.base} asks for another API key; set {VARIABLE} to it")
        if response.status_code != 200:
            said = f"status {response.status_code}: {message_of(response.content)}".rstrip(": ")
            if response.status_code in AWAY:
                raise Away(said)
            raise Refused(f"server {self.base} refuses: {said}", response.status_code)
        try:
            return response.json()
        except ValueError as error:
            raise UserError(
                f"server {self.base} gives an answer that is no JSON ({error}); check that "
                "nothing between changes it"
            ) from error


class Refused(UserError):
    """A request that a server does not grant."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Away(Exception):
    """A server that may answer later."""


class PromptLogprobs:
    """Source of the `top` likeliest tokens and their tail mass, one request a text. `vocab_size` is
    the target's. Nothing is known after the last token of a text: all mass is in the tail there."""

    def __init__(self, server: PatientServer, vocab_size: int, top: int):
        self.server, self.vocab_size, self.top = server, vocab_size, top
        self.model = server.first_model()

    def read(self, text: TextBatch, taps: tuple[int, ...]) -> TargetSignals:
        found = self._found(texts_of(text))
        mask, device = text.attention_mask, text.input_ids.device
        number = (mask.flatten().cumsum(dim=0) - 1).view_as(mask)
        known = TopProbs(*(part.to(device) for part in found))

        def distributions(row: torch.Tensor, position: torch.Tensor) -> TopProbs:
            chosen = number[row, position - 1]
            return TopProbs(*(values[chosen] for values in known))

        return TargetSignals(None, distributions)

    def _found(self, texts: list[list[int]]) -> TopProbs:
        size = min(AT_ONCE, len(texts))  # threads
        shares = [in_background(partial(self._of_all, texts[at::size])) for at in range(size)]
        found = [share.result() for share in shares]
        in_order = [found[at % size][at // size] for at in range(len(texts))]
        return TopProbs(*map(torch.cat, zip(*in_order, strict=True)))

    def _of_all(self, texts: Sequence[list[int]]) -> list[TopProbs]:
        return [self._of(text) for text in texts]

    def _of(self, text: list[int]) -> TopProbs:
        body = {
            "model": self.model,
            "prompt": text,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self.top,
        }
        try:
            answer = self.server.ask("POST", COMPLETIONS_PATH, body)
        except Refused as error:
            if error.status != 400:
                raise
            raise UserError(
                f"{error}; start vLLM with --max-logprobs {self.top} or more, and give a "
                "max_length below its --max-model-len"
            ) from error
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            rows = [sorted_logprobs(entry) for entry in entries[1:]]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"target server {self.server.base} gives no prompt_logprobs; give the URL of vLLM"
            ) from error
        return self._joined(rows, len(text))

    def _joined(self, rows: Sequence[Sequence[tuple[int, float]]], length: int) -> TopProbs:
        top = min(self.top, self.vocab_size)
        if len(rows) != length - 1 or any(len(row) < top for row in rows):
            raise UserError(
                f"target server {self.server.base} gives fewer than {top} prompt_logprobs at "
                "some position; give a smaller target_logprobs"
            )
        ids = torch.zeros(length, top, dtype=torch.int64)
        logprobs = torch.full((length, top), -torch.inf)
        for at, row in enumerate(rows):
            ids[at] = torch.tensor([token for token, _ in row[:top]])
            logprobs[at] = torch.tensor([value for _, value in row[:top]])
        if int(ids.max()) >= self.vocab_size:
            raise UserError(
                f"target server {self.server.base} knows a token {int(ids.max())} and the "
                f"target has {self.vocab_size}; give --target the model that it serves"
            )
        return TopProbs(ids, logprobs, (1 - logprobs.exp().sum(dim=-1)).clamp(min=0))


def texts_of(batch: TextBatch) -> list[list[int]]:
    """Token ids of the texts, row by row."""
    numbers = batch.attention_mask - 1 if batch.segments is None else batch.segments
    return [
        batch.input_ids[row, begin:end].tolist()
        for row, stretches in enumerate(stretches_of(numbers))
        for begin, end, is_text in stretches
        if is_text
    ]


def sorted_logprobs(entry: dict[str, Any]) -> list[tuple[int, float]]:
    """(token, logprob), the likeliest first. The prompt's own token is among them also where it is
    less likely than those that were asked for."""
    pairs = [(int(token), float(found["logprob"])) for token, found in entry.items()]
    return sorted(pairs, key=lambda pair: -pair[1])


def in_background(ask: Callable[[], Found]) -> Future[Found]:
    """Result or error of `ask`, by a thread of its own. No pool: at the end of the process nothing
    waits for a server."""
    found: Future[Found] = Future()

    def resolve() -> None:
        try:
            found.set_result(ask())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=resolve, daemon=True).start()
    return found
