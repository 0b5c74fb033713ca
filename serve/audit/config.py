"""Options of `draftsmith audit`, and what is wrong with them alone. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.client import API_KEY_HELP
from draftsmith.config import (
    AT_LEAST_1,
    INSIDE,
    NOT_NEGATIVE,
    PART,
    SECONDS,
    SHARE,
    check_limits,
    option,
)
from draftsmith.drafters.config import TRUST_HELP
from draftsmith.errors import UserError
from draftsmith.files import check_file
from draftsmith.prompts.suites import SuiteOptions, check_suite


@dataclass(frozen=True, kw_only=True)
class AuditConfig(SuiteOptions):
    kernels: bool = option(False, "audit this installation's verification kernels")
    url: str | None = option(
        None, "audit a running OpenAI-compatible server, for example http://127.0.0.1:8000"
    )
    model: str | None = option(None, "model name; default: the first one that the server lists")
    buffer: str | None = option(
        None,
        "audit the records of served traffic in this folder or fsspec URL, where servers write "
        "them (serve --learn)",
    )
    compare_url: str | None = option(
        None,
        "a server of the same model without speculation, to compare with and to take "
        "distributions from",
    )
    compare_model: str | None = option(None, "model name there; default: the first that it lists")
    api_key: str | None = option(None, API_KEY_HELP)
    target: str | None = option(
        None,
        "take the distribution from this model, run here; default: from the server's own logprobs "
        "of the first token after a prompt",
    )
    trust_remote_code: bool = option(False, TRUST_HELP)
    prompt: str = option("The", "text that the audited contexts begin with")
    contexts: int = option(4, "contexts, each continued many times", limits=AT_LEAST_1)
    samples: int = option(2000, "sampled continuations in all", limits=AT_LEAST_1)
    length: int = option(
        8,
        "tokens of a sampled continuation, beside the k + 1 that let every round draft k tokens",
        limits=AT_LEAST_1,
    )
    k: int | None = option(
        None,
        "draft tokens per round to audit, asked of a draftsmith server; for others what the "
        "server drafts, 0 for none; default: what the server reports",
        limits=NOT_NEGATIVE,
    )
    bias: float = option(
        0.2,
        "total variation of a bias that must be detectable at every drafted depth, else no verdict",
        limits=INSIDE,
    )
    temperature: float = option(1.0, "of samples; 0 audits greedy text alone", limits=NOT_NEGATIVE)
    top_k: int = option(0, "of the samples", limits=NOT_NEGATIVE)
    top_p: float = option(1.0, "of the samples", limits=PART)
    min_p: float = option(0.0, "of the samples", limits=SHARE)
    greedy_tokens: int = option(32, "tokens of a context's greedy continuation", limits=AT_LEAST_1)
    margin: float = option(
        0.5,  # two steps of bfloat16 at logits of 32 to 64; on a CPU swaps up to 0.25 were seen
        "a greedy divergence at a smaller top-2 logprob margin counts as numerical noise",
        limits=NOT_NEGATIVE,
    )
    choices: int = option(16, "continuations asked for in one request; its n", limits=AT_LEAST_1)
    concurrency: int = option(8, "requests in flight", limits=AT_LEAST_1)
    timeout_s: float = option(120.0, "most seconds that one answer may take", limits=SECONDS)
    seeded: bool = option(
        True,
        "send a seed with every request, so that an audit can be repeated; not all servers can "
        "take one",
    )
    impl: str = option("auto", "kernels to audit", choices=("auto", "triton", "torch"))
    device: str = option(
        "cpu", "torch device of the kernel audit, and of the target when one is given"
    )
    false_alarm: float = option(
        1e-9, "chance that a lossless system fails any test, all tests together", limits=INSIDE
    )
    seed: int = option(0, "of the audit's own draws and of sampled requests", limits=NOT_NEGATIVE)
    out: str | None = option(None, "write the report here as JSON")


def check(config: AuditConfig) -> None:
    if not config.kernels and config.url is None and config.buffer is None:
        raise UserError(
            "nothing to audit; give --kernels, or --url with the address of a server, or --buffer "
            "with the folder of its records"
        )
    check_limits(config)
    check_file(config.out, "out")
    check_suite(config, ("prompt",))
    if config.suite is not None and config.url is None:
        raise UserError("a suite is asked of a server; give --url, too")
    if config.compare_url is not None and config.url is None:
        raise UserError(
            f"compare_url is {config.compare_url!r}, but no server is compared with it; give "
            "--url, too"
        )
