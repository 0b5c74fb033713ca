"""Options of `draftsmith bench`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.client import API_KEY_HELP
from draftsmith.config import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, SECONDS, Limits, option
from draftsmith.drafters.config import Pair
from draftsmith.prompts.suites import MOST_HELP, SuiteOptions
from draftsmith.serve.config import AnswerLookup, NumDrafted


@dataclass(frozen=True, kw_only=True)
class ServedPair(AnswerLookup, Pair):
    """Options that a started server has too."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig(SuiteOptions, NumDrafted, ServedPair):
    url: str | None = option(
        None, "a running OpenAI-compatible server, for example http://127.0.0.1:8000"
    )
    target: str | None = option(None, "instead of a URL: a server is started for this target")
    prompts: str = option(
        "stdlib:code",
        "a file or folder of JSON lines, JSON, Parquet, CSV or text (a prompt per line), as for "
        "generate; stdlib:code, stdlib:prose, stdlib:tasks or published:train",
    )
    num_prompts: int = option(16, "prompts of one pass", limits=AT_LEAST_1)
    prompt_chars: int = option(
        400, "length of prompts cut from the standard library", limits=AT_LEAST_1
    )
    max_tokens: int | None = option(
        None, f"most tokens of an answer; {MOST_HELP}", limits=Limits(2)
    )
    ignore_eos: bool | None = option(
        None, "let every answer have all its tokens; default: true, of a suite false"
    )
    temperature: list[float] = option(
        factory=lambda: [0.0, 1.0], help="temperatures, each measured apart", limits=NOT_NEGATIVE
    )
    modes: list[str] = option(
        factory=lambda: ["off", "on"],
        help=(
            "off and on switch speculation per request (a draftsmith server); plain leaves it to "
            "the server"
        ),
    )
    tree: list[str] = option(
        factory=list,
        help="draft trees measured beside the chain, each on a started server of its own, for "
        "example dynamic sampled:3x2x1x1",
    )
    max_length: int | None = option(
        None,
        "most tokens of prompt and answer together in the started server; default: the target's",
        limits=AT_LEAST_1,
    )
    concurrency: list[int] = option(
        factory=lambda: [1],
        help="closed loop: requests in flight, each number measured apart; the next starts when "
        "one ends",
        limits=AT_LEAST_1,
    )
    request_rate: float | None = option(
        None,
        "open loop: requests per second, independent of answers; default: closed loop",
        limits=POSITIVE,
    )
    repeats: int = option(
        3,
        "passes over the prompts, modes taking turns: of one user by the prompt",
        limits=AT_LEAST_1,
    )
    model: str | None = option(None, "model name; default: the first one that the server lists")
    api_key: str | None = option(None, API_KEY_HELP)
    seed: int = option(
        0,
        "of the built-in prompts and of the times between requests; sent with no request",
        limits=NOT_NEGATIVE,
    )
    out: str | None = option(None, "write the figures here as JSON, a page beside it (.html)")
    timeout_s: float = option(
        600.0, "most seconds for the server's start, and for one answer", limits=SECONDS
    )
