"""Requests to the server that runs the target. One that is away is waited for; what it refuses is
raised at once. `in_background` makes one while something else goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx
import torch
from safetensors.torch import load

from draftsmith.api_key import VARIABLE, bearer
from draftsmith.drafters.remote.kept_connections import send
from draftsmith.drafters.remote.messages import (
    BODY_TYPE,
    MALFORMED,
    REVISION_HEADER,
    STATES_PATH,
    TARGET_PATH,
    WEIGHTS_PATH,
    StatesOfTexts,
    Texts,
    body_of_texts,
    states_of_body,
)
from draftsmith.errors import UserError

Found = TypeVar("Found")

BUSY = (429, 502, 503, 504)
CONNECT_S = 10.0
READ_S = 600.0  # a pass over long texts, behind those of others
WAIT_S = 120.0  # for a server that is away
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
GO_ON = "start it, then the same command again, which goes on from what it saved"


class Connection:
    """Kept connections to one server. May be used by several threads."""

    def __init__(
        self,
        url: str,
        *,
        wait_s: float | None = None,
        transport: httpx.BaseTransport | None = None,
    ):
        self.base = url.rstrip("/").removesuffix("/v1")
        self.wait_s = WAIT_S if wait_s is None else wait_s
        self.revision: str | None = None  # that answers must be of; None: of any
        self.hidden_size = 0  # of the states in answers
        try:
            self.http = httpx.Client(
                base_url=self.base,
                headers=bearer(None),
                timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
                transport=transport,
            )
        except httpx.InvalidURL as error:
            raise UserError(
                f"option 'target_server' is {url!r}, no URL ({error}); give one such as "
                "http://HOST:8000"
            ) from error

    def description(self) -> dict[str, Any]:
        found = self._ask("GET", TARGET_PATH)
        try:
            return dict(found.json())
        except (ValueError, TypeError) as error:
            raise self._no_target("its answer is no JSON") from error

    def json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Answer to a request of an OpenAI-compatible server, of which one that says 500 may be
        ending, as vLLM does without its engine."""
        content = None if body is None else json.dumps(body).encode()
        response = self._ask(method, path, content, "application/json", away=(500, *BUSY))
        try:
            return response.json()
        except ValueError as error:
            raise self._damaged(error) from error

    def weights(self, layer: int | None = None) -> dict[str, torch.Tensor]:
        """Those of a layer, else those outside of all layers."""
        path = WEIGHTS_PATH if layer is None else f"{WEIGHTS_PATH}/{layer}"
        response = self._ask("GET", path)
        try:
            return load(response.content)
        except MALFORMED as error:
            raise self._damaged(error) from error

    def states(self, texts: Texts) -> StatesOfTexts:
        response = self._ask("POST", STATES_PATH, body_of_texts(texts))
        try:
            return states_of_body(response.content, texts, self.hidden_size)
        except MALFORMED as error:
            raise self._damaged(error) from error

    def _ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        kind: str = BODY_TYPE,
        *,
        away: Sequence[int] = BUSY,
    ) -> httpx.Response:
        """The answer with status 200, of the target's revision. `away`: statuses to wait at."""
        response = self._patiently(lambda: self._once(method, path, content, kind, away))
        found = response.headers.get(REVISION_HEADER)
        if self.revision is not None and found != self.revision:
            raise UserError(
                f"target server {self.base} has other weights than when this run began (revision "
                f"{found}, then {self.revision}); give it the former ones, or start again"
            )
        return response

    def _once(
        self, method: str, path: str, content: bytes | None, kind: str, away: Sequence[int]
    ) -> httpx.Response:
        headers = {} if content is None else {"content-type": kind}
        request = self.http.build_request(method, path, content=content, headers=headers)
        response = send(self.http.send, request)
        if response.status_code in away:
            raise Away(_message(response))
        if response.status_code == 401:
            raise UserError(
                f"target server {self.base} asks for another API key; set {VARIABLE} to it"
            )
        if response.status_code == 404 and path == TARGET_PATH:
            raise self._no_target(_message(response))
        if response.status_code != 200:
            raise Refused(
                f"target server {self.base} refuses: {_message(response)}", response.status_code
            )
        return response

    def _patiently(self, ask: Callable[[], httpx.Response]) -> httpx.Response:
        """Asks until there is an answer, for `wait_s` at most from the first failure."""
        failed_s: float | None = None
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return ask()
            except (httpx.HTTPError, httpx.InvalidURL, Away) as error:
                now_s = time.monotonic()
                failed_s = now_s if failed_s is None else failed_s
                if now_s - failed_s + pause_s > self.wait_s or not may_pass(error):
                    raise UserError(
                        f"target server {self.base} does not answer ({_reason(error)}); {GO_ON}"
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _damaged(self, error: Exception) -> UserError:
        return UserError(
            f"target server {self.base} gives an answer of another form ({_reason(error)}); check "
            "that nothing between changes it, and use one version of draftsmith on both"
        )

    def _no_target(self, why: str) -> NoStates:
        return NoStates(
            f"server {self.base} gives no states of its target ({why}); start draftsmith serve "
            "--target T --states-max-tokens 16384, or store them where the target is (draftsmith "
            "generate --store-taps bf16)"
        )


class NoStates(UserError):
    """A server that gives no states of its target."""


class Refused(UserError):
    """A request that a server does not grant."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Away(Exception):
    """A server that may answer later."""


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


def may_pass(error: Exception) -> bool:
    """False for what no waiting mends."""
    return not isinstance(error, (httpx.InvalidURL, httpx.UnsupportedProtocol))


def _reason(error: Exception) -> str:
    return str(error).strip() or type(error).__name__


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"
