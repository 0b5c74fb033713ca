"""Options of the engine, of the drafts that a server loads, and of the server. Torch-free."""

from __future__ import annotations

import socket
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from draftsmith.client import KEEP_ALIVE_S, VARIABLE
from draftsmith.config import (
    AT_LEAST_1,
    BELOW_1,
    NOT_NEGATIVE,
    PART,
    PORT,
    POSITIVE,
    SECONDS,
    Limits,
    option,
)
from draftsmith.drafters.config import DTYPES, SAMPLINGS, Pair
from draftsmith.errors import UserError
from draftsmith.progress import LOG_FORMATS
from draftsmith.serve.control.control import MAX_AUTO_K, MAX_K
from draftsmith.serve.tools.answer import REASONING_FORMATS
from draftsmith.serve.tools.call_format import CALL_FORMATS

LOOKUP_HELP, SPECULATION_HELP = "drafts from text", "drafting and verification"


@dataclass(frozen=True, kw_only=True)
class LookupOptions:
    """Drafts looked up in text."""

    HELP_TITLE: ClassVar[str] = LOOKUP_HELP

    suffix: bool = option(
        False,
        "draft what most likely follows, by the request's own text and by finished requests; "
        "beside a draft, where sure",
    )


@dataclass(frozen=True, kw_only=True)
class AnswerLookup(LookupOptions):
    """Such drafts of requests whose draws the answers have no part in, which `generate` cannot
    promise: its seeds may be those of the answers."""

    HELP_TITLE: ClassVar[str] = LOOKUP_HELP

    suffix_answers: str | None = option(
        None,
        "with --suffix, draft from these answers of the target too: a folder of `generate`, or "
        "demo for those that ship",
    )


@dataclass(frozen=True, kw_only=True)
class ServedLookup(AnswerLookup):
    """Such drafts of a server, in detail."""

    HELP_TITLE: ClassVar[str] = LOOKUP_HELP

    suffix_max_cached_requests: int = option(
        10000,
        "finished requests searched, the oldest forgotten first; 0 shares nothing",
        limits=NOT_NEGATIVE,
    )


TREE_HELP = (
    "draft trees in place of chains of k tokens: dynamic[:nodes=24,depth=5,width=4], "
    "sampled[:3x2x1x1], or auto: the first for greedy requests, the second for others; of a medusa "
    "draft medusa or choices:0,0.0,1"
)
CONFIDENCE_HELP = (
    "end a chain where the product of the draft's largest probabilities falls below this; 0: never"
)
VERIFICATIONS = ("chain", "block")
VERIFICATION_HELP = "how a chain's drafts are verified: one by one, or together (keeps more)"
SEED_HELP = (
    "makes the answers to requests without a seed repeat after a restart, for tests; default: a "
    "new one at each start"
)
RECORD_TAPS_HELP = (
    "record the target's states that the draft reads too, in bfloat16, at so many first positions "
    "of each recorded request, for learn.teacher=recorded; 0: none"
)
DEFAULT_K = 4


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Drafting and verification in a server and in Python."""

    HELP_TITLE: ClassVar[str] = SPECULATION_HELP

    least_confidence: float = option(0.0, CONFIDENCE_HELP, limits=BELOW_1)
    verification: str = option("chain", VERIFICATION_HELP, choices=VERIFICATIONS)
    draft_sampling: str = option(
        "sampled",
        "drafts are drawn from the draft's distribution, or its likeliest tokens",
        choices=SAMPLINGS,
    )
    tree: str | None = option(None, TREE_HELP)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Batch, memory and compilation of an engine, in a server and in Python."""

    HELP_TITLE: ClassVar[str] = "batch, memory and compilation"

    max_batch: int = option(8, "requests that run at the same time", limits=AT_LEAST_1)
    max_round_tokens: int = option(
        512, "tokens of one target pass; longer prompts are fed in pieces", limits=AT_LEAST_1
    )
    max_queue: int = option(
        256, "requests that may wait; one more is answered with 429", limits=AT_LEAST_1
    )
    max_length: int | None = option(
        None,
        "most tokens of prompt and answer together; default: what the target allows",
        limits=AT_LEAST_1,
    )
    block_size: int = option(16, "positions of a block of keys and values", limits=AT_LEAST_1)
    num_blocks: int | None = option(
        None,
        "blocks of the paged pool; default: what memory_gib or the batch needs",
        limits=AT_LEAST_1,
    )
    memory_gib: float | None = option(
        None,
        "most memory for keys and values, target's and draft's, and a draft's buffers on a CPU; "
        "default: 80 % of what a GPU has free, 2 GiB on a CPU",
        limits=POSITIVE,
    )
    prefix_cache: bool = option(True, "keep blocks of finished text for requests that begin alike")
    compile: str = option(
        "auto", "replay captured forwards, on a GPU within CUDA graphs", choices=("auto", "off")
    )
    warm_up: bool = option(
        True, "on a GPU, capture CUDA graphs and compile kernels before the first request"
    )
    seed: int | None = option(None, SEED_HELP, limits=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineOptions, SpeculationOptions):
    """Options of an engine in Python."""

    k: int = option(
        DEFAULT_K,
        "draft tokens per round; a request may ask for fewer or more",
        limits=Limits(0, MAX_K, "[]"),
    )
    adaptive: bool = option(
        False,
        "draft as many tokens as pay, by measured round times and survival; k is then the most",
    )
    engine_name: str = option("", "name of the engine in records, for a buffer of several")
    record_taps: int = option(0, RECORD_TAPS_HELP, limits=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """Records that a server leaves and versions that it follows."""

    HELP_TITLE: ClassVar[str] = "versions that are followed and records that are left"

    versions: str | None = option(
        None, "a folder of draft versions to follow; new ones are swapped in between rounds"
    )
    poll_s: float = option(1.0, "seconds between looks into the versions folder", limits=SECONDS)
    learn: str | None = option(None, "a buffer folder or URL that records rounds for learning")
    engine_name: str | None = option(
        None, "name of this server in records, for a buffer of several; default: HOST NAME:PORT"
    )
    learn_share: float = option(
        1.0,
        "the part of requests that is recorded, whole ones; what recording costs goes with it",
        limits=PART,
    )
    learn_distributions: bool = option(
        True,
        "record the distributions of target and draft too; without them a buffer holds tokens "
        "alone",
    )
    record_taps: int = option(0, RECORD_TAPS_HELP, limits=NOT_NEGATIVE)
    redact: str | None = option(
        None,
        "module:function that gives (begin, end) of what to mask in a request's text before it is "
        "recorded",
    )


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """The server that clients meet."""

    HELP_TITLE: ClassVar[str] = "the server that clients meet"

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on", limits=PORT)
    api_key: tuple[str, ...] | None = option(
        None,
        "if given, requests must carry one of these as a bearer token "
        f"[default: {VARIABLE} of the environment]",
    )
    max_body_bytes: int = option(
        16 * 2**20, "largest request body; a larger one is answered with 413", limits=POSITIVE
    )
    max_concurrency: int | None = option(
        None,
        "answers made at the same time, waiting ones included; one more is answered with 429",
        limits=POSITIVE,
    )
    request_timeout_s: float | None = option(
        None,
        "seconds that a request may take; then it is ended and answered with 408",
        limits=SECONDS,
    )
    keep_alive_s: int = option(
        KEEP_ALIVE_S,
        "seconds that a connection stays open for a client's next request",
        limits=Limits(1, 10**9),
    )
    drain_s: float = option(
        30.0, "seconds that running requests get to finish after SIGTERM", limits=Limits(0, 10**9)
    )
    name: str | None = option(None, "model name in the API; default: the target's")
    tool_call_parser: str = option(
        "auto",
        "format of tool calls in answers; auto: as the chat template shows it",
        choices=("auto", "none", *CALL_FORMATS),
    )
    reasoning_parser: str = option(
        "auto",
        "format of the reasoning before answers; auto: as the chat template shows it",
        choices=("auto", "none", *REASONING_FORMATS),
    )
    per_request_spec_decode_metrics: str = option(
        "none",
        "report on its drafts in every response, as vLLM gives it",
        choices=("none", "summary", "detailed"),
    )
    log_stats_s: float = option(
        10.0,
        "seconds between two log lines of throughput and acceptance; 0: none",
        limits=Limits(0, 10**9),
    )
    log_format: str = option(
        "text", "log lines with time and level, or a JSON object a line", choices=LOG_FORMATS
    )


@dataclass(frozen=True, kw_only=True)
class NumDrafted:
    """Number of drafted tokens of a round, fixed or by `auto`."""

    HELP_TITLE: ClassVar[str] = SPECULATION_HELP

    k: str | None = option(
        None,
        "draft tokens per round, or auto: as many as pay, as measured [default: as many as the "
        "draft was trained for, else 4; of drafts from text alone auto]; a request may ask for "
        "its own number",
    )

    def most_drafted(self, default: int | Literal["auto"] = DEFAULT_K) -> tuple[int, bool]:
        """Most draft tokens of a round, and whether fewer are drafted where fewer pay."""
        if (self.k or default) == "auto":
            return MAX_AUTO_K, True
        if self.k is None:
            return min(int(default), MAX_K), False
        if not self.k.isdecimal():
            raise UserError(f"k is {self.k!r}; give a whole number or auto")
        return int(self.k), False


@dataclass(frozen=True, kw_only=True)
class ServeConfig(
    HttpOptions, LearningOptions, EngineOptions, ServedLookup, NumDrafted, SpeculationOptions, Pair
):
    """Options of a server: of its parts, and of the pair's device."""

    target: str = option(help="the target: a folder, Hub id or GGUF file")
    lora: tuple[str, ...] | None = option(
        None, "LoRA adapters of the target, NAME=FOLDER each, which requests name as their model"
    )
    dtype: str = option(
        "auto",
        "weights' type; auto: the checkpoint's own, on a CPU wherever it is fast at that, else "
        "float32",
        choices=DTYPES,
    )
    device: str | None = option(None, "torch device; default: the first CUDA device, else the CPU")
    threads: int | None = option(
        None, "CPU threads; default: one for each core", limits=Limits(1, 1024, "[]")
    )

    def engine_config(self, default_k: int | Literal["auto"] = DEFAULT_K) -> EngineConfig:
        """Options of the engine alone."""
        shared = {
            field.name: getattr(self, field.name)
            for part in (EngineOptions, SpeculationOptions)
            for field in fields(part)
        }
        name = f"{socket.gethostname()}:{self.port}"
        k, adaptive = self.most_drafted(default_k)
        return EngineConfig(
            k=k,
            adaptive=adaptive,
            engine_name=name if self.engine_name is None else self.engine_name,
            record_taps=self.record_taps,
            **shared,
        )
