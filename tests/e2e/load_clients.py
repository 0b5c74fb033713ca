"""A crowd of clients that ask for everything, leave when they like and hold what they get against a
quiet server's answers.

A program of its own, so that what it takes is not taken from the test's process: `python
load_clients.py JOB.json` with {quiet_url, url, num_clients, seconds} prints what it saw as JSON, or
fails with the first wrong answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

Body = dict[str, Any]
SHARED = "def draft(self, tokens):\n    return [token for token in tokens]\n"
PROMPTS = [SHARED + tail for tail in ("", "import os\n", "for name in ")] + [
    "The target",
    "x",
    SHARED[:30],
    SHARED[20:],
]
MOST = 48  # tokens of an answer
# Two float32 passes over the same text in batches of other shapes differ by about 1e-5 in a
# log-probability.
NOISE = 1e-3


@dataclass
class QuietAnswer:
    """Greedy, alone on a server that drafts nothing."""

    tokens: list[int]
    margins: list[float]  # of each token's log-probability to the runner-up's

    def right(self, tokens: list[int]) -> bool:
        """Whether they are its beginning, up to the first token that rounding may decide."""
        for index, (told, own) in enumerate(zip(tokens, self.tokens)):
            if told != own:
                return self.margins[index] < NOISE
        return len(tokens) <= len(self.tokens)


def ask_quietly(url: str, prompt: str) -> QuietAnswer:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": MOST,
        "ignore_eos": True,
        "temperature": 0,
    }
    body |= {"logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = (
        httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        .raise_for_status()
        .json()["choices"]
    )
    margins = []
    for tops in choice["logprobs"]["top_logprobs"]:
        first, second = sorted(tops.values(), reverse=True)[:2]
        margins.append(first - second)
    return QuietAnswer(choice["token_ids"], margins)


@dataclass
class Crowd:
    url: str
    quiet: list[QuietAnswer]
    num_clients: int
    seconds: float
    # complete, left; of the complete ones: stopped, greedy, near
    ends: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    num_choices: int = 0  # sent

    async def run(self) -> None:
        until_s = time.monotonic() + self.seconds
        limits = httpx.Limits(max_connections=2 * self.num_clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:
            clients = [
                self._client(http, random.Random(number), until_s)
                for number in range(self.num_clients)
            ]
            await asyncio.gather(*clients)

    async def _client(self, http: httpx.AsyncClient, chance: random.Random, until_s: float) -> None:
        while time.monotonic() < until_s:
            index = chance.randrange(len(PROMPTS))
            body = wish(chance, index, self.quiet[index])
            self.num_choices += body["n"]
            leaves = chance.random() < 0.3
            if body["stream"]:
                choices = await self._streamed(
                    http, body, leave_after=chance.randint(0, 12) if leaves else None
                )
            else:
                choices = await self._whole(
                    http, body, leave_after_s=chance.uniform(0, 2) if leaves else None
                )
            if choices is None:
                self.ends["left"] += 1
                continue
            self.ends["complete"] += 1
            for choice in choices:
                self._check(body, self.quiet[index], choice)

    async def _whole(
        self, http: httpx.AsyncClient, body: Body, *, leave_after_s: float | None
    ) -> list[Body] | None:
        try:
            response = await asyncio.wait_for(
                http.post("/v1/completions", json=body), leave_after_s
            )
        except asyncio.TimeoutError:
            return None
        self.statuses[response.status_code] += 1
        assert response.status_code == 200, response.text
        told = response.json()
        assert told["usage"]["completion_tokens"] == sum(
            len(choice["token_ids"]) for choice in told["choices"]
        )
        return told["choices"]

    async def _streamed(
        self, http: httpx.AsyncClient, body: Body, *, leave_after: int | None
    ) -> list[Body] | None:
        choices: list[Body] = [{"token_ids": [], "finish_reason": None} for _ in range(body["n"])]
        events = 0
        async with http.stream("POST", "/v1/completions", json=body) as response:
            self.statuses[response.status_code] += 1
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if not line:
                    continue
                if events == leave_after:
                    return None
                events += 1
                if line == "data: [DONE]":
                    return choices
                told = json.loads(line.removeprefix("data: "))
                assert "error" not in told, told
                for piece in told["choices"]:
                    choice = choices[piece["index"]]
                    assert choice["finish_reason"] is None, "tokens after the end"
                    choice["token_ids"] += piece["token_ids"]
                    choice["finish_reason"] = piece["finish_reason"]
        raise AssertionError(f"a stream ended without its [DONE]: {choices}")

    def _check(self, body: Body, quiet: QuietAnswer, choice: Body) -> None:
        tokens, reason = choice["token_ids"], choice["finish_reason"]
        assert reason in ("stop", "length"), choice
        assert 1 <= len(tokens) <= body["max_tokens"]
        assert reason == "stop" or len(tokens) == body["max_tokens"]
        self.ends["stopped"] += reason == "stop"
        if body["temperature"] > 0:
            return
        assert quiet.right(tokens), (
            f"{tokens} instead of {quiet.tokens} (margins {quiet.margins}) for {body}"
        )
        same = tokens == quiet.tokens[: len(tokens)]
        self.ends["greedy" if same else "near"] += 1
        if same and "stop_token_ids" in body:
            (stop,) = body["stop_token_ids"]
            assert stop not in tokens[:-1] and (tokens[-1] == stop) == (reason == "stop")


def wish(chance: random.Random, index: int, quiet: QuietAnswer) -> Body:
    """A request for prompt `index`: greedy and as on the quiet server as often as not."""
    body: Body = {
        "model": "tiny",
        "prompt": PROMPTS[index],
        "max_tokens": chance.randint(1, MOST),
        "ignore_eos": True,
        "temperature": chance.choice([0, 0, 0.7, 1.0]),
        "stream": chance.random() < 0.6,
        "n": chance.choice([1, 1, 1, 2]),
        "return_token_ids": True,
        "request_class": chance.choice(["", "chat", "code"]),
    }
    if chance.random() < 0.3:
        body["speculation"] = {"k": chance.randint(0, 6)}
    if chance.random() < 0.3:
        body["stop_token_ids"] = [chance.choice(quiet.tokens)]
    if body["temperature"] > 0:
        body |= chance.choice(
            [
                {},
                {"seed": chance.randrange(2**31)},
                {"top_p": 0.9},
                {"presence_penalty": 0.5},
                {"stop": ["e"]},
            ]
        )
    return body


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    quiet = [ask_quietly(job["quiet_url"], prompt) for prompt in PROMPTS]
    crowd = Crowd(job["url"], quiet, job["num_clients"], job["seconds"])
    asyncio.run(crowd.run())
    # The server answers as if nothing had been.
    for prompt, answer in zip(PROMPTS, quiet):
        assert answer.right(ask_quietly(job["url"], prompt).tokens), prompt
    seen = {
        "ends": crowd.ends,
        "statuses": crowd.statuses,
        "num_choices": crowd.num_choices + len(PROMPTS),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
