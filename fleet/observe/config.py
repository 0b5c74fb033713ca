"""Options of `draftsmith observe`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.client import API_KEY_HELP
from draftsmith.config import NOT_NEGATIVE, PART, PORT, SHARE, TOP, Limits, option
from draftsmith.drafters.config import TRUST_HELP


@dataclass(frozen=True, kw_only=True)
class DefaultSampling:
    """Sampling of a request that names none, as the server has it (vLLM reads the target's
    generation_config.json)."""

    temperature: float = option(1.0, "0 is greedy", limits=NOT_NEGATIVE)
    top_k: int = option(0, "0 is off", limits=NOT_NEGATIVE)
    top_p: float = option(1.0, "1 is off", limits=PART)
    min_p: float = option(0.0, "0 is off", limits=SHARE)


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    url: str = option(help="OpenAI-compatible server whose traffic is recorded")
    buffer: str = option(help="folder or fsspec URL to write records to (distill --buffer)")
    listen: str = option("127.0.0.1:8100", "address that clients use in that server's place")
    target: str = option(
        "",
        "folder or Hub id of the target; its tokenizer stands in where the server gives no token "
        "ids; without it such answers are left out",
    )
    target_revision: str = option(
        "", "the learner's name of the target's weights, for a buffer that outlives them"
    )
    model: str | None = option(
        None,
        "name on that server whose answers are recorded; by default those that are no adapter",
    )
    draft_version: str = option("", "published version that the server drafts with")
    sampler: str = option(
        "",
        "how it drafts at a temperature (vLLM and SGLang: greedy, unless set otherwise); without "
        "it acceptance is compared with no version's",
        choices=("", "probabilistic", "greedy"),
    )
    engine: str = option("", "name of the server in records, for a buffer of several")
    share: float = option(1.0, "of the requests that are recorded", limits=SHARE)
    enrich: str = option(
        "none",
        "also request token ids, or token ids and logprobs, and take them out of the answer again",
        choices=("none", "tokens", "logprobs"),
    )
    top_logprobs: int = option(
        20,
        "how many with --enrich logprobs; vLLM --max-logprobs bounds it",
        limits=Limits(1, TOP, "[]"),
    )
    api_key: str | None = option(None, f"of the proxy's own requests: {API_KEY_HELP}")
    defaults: DefaultSampling = option(
        help="sampling of requests that name none", factory=DefaultSampling
    )
    status_port: int | None = option(
        None, "serve Prometheus text at /metrics of this port", limits=PORT
    )
    status_host: str = option("127.0.0.1", "address of that port")
    trust_remote_code: bool = option(False, TRUST_HELP)
