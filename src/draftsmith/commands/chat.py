"""`draftsmith chat`: a conversation with any OpenAI server in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftsmith.client import API_KEY_HELP, base_of, bearer, message_of
from draftsmith.config import AT_LEAST_1, NOT_NEGATIVE, check_limits, option
from draftsmith.errors import UserError, first_line

if TYPE_CHECKING:
    import httpx

HINT = "Ctrl-C ends an answer, /new begins another conversation, /exit ends, //text sends /text"
WAIT_S = 600.0  # for the next part of an answer
CONNECT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    url: str = option("http://127.0.0.1:8000", "a running OpenAI-compatible server")
    model: str | None = option(None, "model name; default: the first one that the server lists")
    api_key: str | None = option(None, API_KEY_HELP)
    max_tokens: int | None = option(
        None, "most tokens of an answer; default: the server's", limits=AT_LEAST_1
    )
    temperature: float | None = option(
        None, "of the answers; default: the server's", limits=NOT_NEGATIVE
    )


def run(config: ChatConfig) -> int:
    import httpx  # not for the options

    check_limits(config)
    headers, url = bearer(config.api_key), base_of(config.url)
    waits = httpx.Timeout(WAIT_S, connect=CONNECT_S)
    with httpx.Client(base_url=url, headers=headers, timeout=waits) as http:
        # A server that loads its models answers afterwards.
        print(f"asking {url} for its models", flush=True)
        try:
            data = http.get("/v1/models").raise_for_status().json()["data"] or ()
            listed = [one for one in data if isinstance(one, dict)]
            model = config.model or listed[0]["id"]
        except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
            why = first_line(error)
            raise UserError(
                f"{url} lists no models ({why}); check --url, --api-key and that the server runs"
            ) from error
        # Another server may refuse a field of ours.
        is_ours = any(one.get("owned_by") == "draftsmith" for one in listed)
        names = [str(one.get("id")) for one in listed]
        if names and model not in names:
            told = f"{url} serves {', '.join(names)}, not {model!r}"
            if is_ours:
                raise UserError(f"{told}; give one of its names as --model")
            print(f"{told}; it may answer all the same")
        extra: dict[str, Any] = {"speculation": {"report": True}} if is_ours else {}
        sampling = {"max_tokens": config.max_tokens, "temperature": config.temperature}
        extra |= {name: value for name, value in sampling.items() if value is not None}
        print(f"{model} at {url}; {HINT}")
        converse(http, {"model": model, "stream_options": {"include_usage": True}, **extra})
    return 0


def converse(http: httpx.Client, body: dict[str, Any]) -> None:
    """Asks what is typed, with all that was said before, until it is `/exit` or the end."""
    said: list[dict[str, str]] = []
    for text in typed():
        if text == "/new":
            said = []
            continue
        asked = [*said, {"role": "user", "content": text.removeprefix("/")}]
        try:
            answer = answered(http, {**body, "messages": asked, "stream": True})
        except UserError as error:
            print(f"draftsmith: error: {error}", file=sys.stderr)
        else:
            if answer:
                said = [*asked, {"role": "assistant", "content": answer}]


def typed() -> Iterator[str]:
    """Texts, and commands but `/exit`; a text that begins with a slash has two of them."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its keys and its history
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print(f"\n{HINT}")
            continue
        if text == "/exit":
            return
        if text.startswith("/") and text != "/new" and not text.startswith("//"):
            print(f"{text.split()[0]} is no command: {HINT}")
        elif text:
            yield text


def answered(http: httpx.Client, body: dict[str, Any]) -> str:
    """The answer, or what came of it before Ctrl-C, printed as it comes. Raises `UserError`."""
    answer, parts, begun_s = "", 0, time.monotonic()
    last: dict[str, Any] = {}
    try:
        for chunk in chunks(http, body):
            last |= {
                name: chunk[name]
                for name in ("usage", "metrics")
                if isinstance(chunk.get(name), dict)
            }
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                text, thought = delta.get("content") or "", delta.get("reasoning_content") or ""
                answer, parts = answer + text, parts + bool(text or thought)
                print(thought, text, sep="", end="", flush=True)
    except KeyboardInterrupt:
        pass
    except (AttributeError, TypeError) as error:
        raise UserError(f"the server sent {json.dumps(chunk)[:100]!r}; check --url") from error
    passed_s = time.monotonic() - begun_s
    tokens = last.get("usage", {}).get("completion_tokens") or parts
    tau = ((last.get("metrics") or {}).get("speculative_decoding") or {}).get("tau")
    figures = f"{tokens} tokens, {tokens / passed_s:.1f} tok/s"
    print(f"\n[{figures}{'' if tau is None else f', tau {tau:.2f}'}]")
    return answer


def chunks(http: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of a stream.

    Raises:
        UserError: the request was refused, the stream broke off, or there is none.
    """
    import httpx

    found = False
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise UserError(message_of(response.read()))
            pending = ""
            for part in response.iter_text():
                *lines, pending = (pending + part).split("\n")
                for line in lines:
                    event = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or event == "[DONE]":
                        continue
                    chunk = json.loads(event)
                    if not isinstance(chunk, dict):
                        raise UserError(f"the server sent {event[:100]!r}; check --url")
                    if chunk.get("error"):
                        raise UserError(message_of(event.encode()))
                    found = True
                    yield chunk
            if not found:
                kind = response.headers.get("content-type", "nothing")
                raise UserError(f"the server sent {kind}, no stream of answers; check --url")
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        why = first_line(error)
        raise UserError(f"the answer broke off ({why}); is the server still running?") from error
