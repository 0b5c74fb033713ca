"""Options of `draftsmith fleet` and `draftsmith observe`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.client import API_KEY_HELP
from draftsmith.config import AT_LEAST_1, NOT_NEGATIVE, PART, PORT, SECONDS, SHARE, option
from draftsmith.drafters.config import TRUST_HELP
from draftsmith.train.config import LAYOUTS

ACTIONS = ("status", "promote", "rollback", "publish")


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    action: str = option(help="what to do", choices=ACTIONS, positional=True)
    versions: str = option(
        help="folder or fsspec URL that the engines read; for publish the learner's own folder"
    )
    version: int | None = option(
        None, "for promote and rollback: the version that becomes live", limits=AT_LEAST_1
    )
    json: bool = option(False, "for status: print JSON")
    watch: bool = option(False, "for status: go on until interrupted")
    every_s: float = option(5.0, "seconds between two looks of --watch", limits=SECONDS)
    to: str | None = option(None, "for publish: folder or fsspec URL that the engines read")
    layouts: tuple[str, ...] = option(
        (),
        "for publish: engine layouts beside each version, by their names in export --to",
        choices=LAYOUTS,
    )
    target: str | None = option(
        None, "for publish: folder or Hub id of the target [default: the one the draft names]"
    )
    trust_remote_code: bool = option(False, TRUST_HELP)
    keep: int = option(
        20,
        "for publish: versions that stay beside those in use; 0 deletes none",
        limits=NOT_NEGATIVE,
    )
    poll_s: float = option(
        2.0, "for publish: seconds between two looks at the learner's folder", limits=SECONDS
    )
    once: bool = option(False, "for publish: stop when the live version is there")


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
        None, "name on that server whose answers are recorded; by default those that are no adapter"
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
    api_key: str | None = option(None, f"of the proxy's own requests: {API_KEY_HELP}")
    defaults: DefaultSampling = option(
        help="sampling of requests that name none", factory=DefaultSampling
    )
    status_port: int | None = option(
        None, "serve Prometheus text at /metrics of this port", limits=PORT
    )
    status_host: str = option("127.0.0.1", "address of that port")
    trust_remote_code: bool = option(False, TRUST_HELP)
