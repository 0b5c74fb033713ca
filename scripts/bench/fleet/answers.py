"""Traffic that changes, its answers, and their records: texts and acceptance of any engine that
writes round records."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx

from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.distill.buffer.traffic import stitch
from draftsmith.record import RoundRecord, hashed_answer
from scripts.demo.traffic import Shift


class Answer(NamedTuple):
    id: str
    prompt: list[int]
    tokens: list[int]
    is_code: bool


def send(
    shift: Shift,
    urls: Sequence[str],
    prompts: list[list[int]],
    named: Callable[[str], dict[str, Any]],
) -> list[Answer | None]:
    """Answers in the order of the prompts, None for each that was not a whole answer; engines take
    turns by a fixed draw. `named` gives an engine's fields for the model and a request's class."""
    draws = random.Random(3)
    chosen = [draws.choice(urls) for _ in prompts]

    def one(index: int) -> Answer | None:
        body = {
            "prompt": prompts[index], "max_tokens": shift.max_tokens, "temperature": 1.0,
            "return_token_ids": True, **named("code" if index < shift.code else "prose"),
        }  # fmt: skip
        try:
            answer = httpx.post(f"{chosen[index]}/v1/completions", json=body, timeout=300)
            values = answer.raise_for_status().json()
        except (httpx.HTTPError, json.JSONDecodeError):
            return None
        tokens = values["choices"][0]["token_ids"]
        return Answer(values["id"], prompts[index], tokens, index < shift.code)

    with ThreadPoolExecutor(shift.clients) as pool:
        return list(pool.map(one, range(len(prompts))))


def recorded(buffer: str, count: int, *, patience_s: float = 30.0) -> dict[str, list[RoundRecord]]:
    """Records by the hash of their answer's id, once `count` answers have their last one or
    `patience_s` has brought no more."""
    deadline_s = time.monotonic() + patience_s
    while True:
        found: dict[str, list[RoundRecord]] = {}
        for record in BufferReader(buffer).read(max_records=1 << 30).records:
            found.setdefault(record.request.partition("-")[0], []).append(record)
        whole = sum(any(one.last for one in own) for own in found.values())
        if whole >= count or time.monotonic() > deadline_s:
            return found
        time.sleep(1)


def texts_of(answers: Sequence[Answer], records: dict[str, list[RoundRecord]]) -> dict[str, int]:
    """Numbers of answers that have records, and of texts that are those of the clients."""
    stitched = [stitch(records.get(hashed_answer(answer.id), [])) for answer in answers]
    equal = sum(
        text is not None and text.tokens == answer.prompt + answer.tokens
        for answer, text in zip(answers, stitched)
    )
    return {"recorded": sum(text is not None for text in stitched), "equal_texts": equal}


def acceptance(answers: Sequence[Answer], records: dict[str, list[RoundRecord]]) -> dict[str, Any]:
    """Alpha and tau on code, on prose by version and on its last quarter."""
    own = [(answer, records.get(hashed_answer(answer.id), [])) for answer in answers]
    prose = [rounds for answer, rounds in own if not answer.is_code]
    by_version: dict[str, list[RoundRecord]] = {}
    for record in (one for rounds in prose for one in rounds if one.drafted):
        by_version.setdefault(record.draft_version, []).append(record)
    ordered = sorted(by_version, key=lambda name: int(name or 0))
    return {
        "code": alpha_of(one for answer, rounds in own if answer.is_code for one in rounds),
        "prose": {name: alpha_of(by_version[name]) for name in ordered},
        "last_quarter": alpha_of(one for rounds in prose[-len(prose) // 4 :] for one in rounds),
    }


def alpha_of(records: Iterable[RoundRecord]) -> dict[str, float]:
    drafted = [one for one in records if one.drafted]
    accepted = sum(one.accepted for one in drafted)
    reached = sum(min(one.accepted + 1, len(one.drafted)) for one in drafted)
    return {
        "rounds": len(drafted),
        "alpha": accepted / max(1, reached),
        "tau": 1 + accepted / max(1, len(drafted)),
    }
