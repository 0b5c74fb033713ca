"""Options of `draftsmith generate` and `draftsmith distill`. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftsmith.client import API_KEY_HELP
from draftsmith.config import (
    AT_LEAST_1,
    BELOW_1,
    INSIDE,
    NOT_NEGATIVE,
    PART,
    PORT,
    POSITIVE,
    SECONDS,
    SHARE,
    Limits,
    option,
)
from draftsmith.drafters.config import DTYPES, OFFLOAD_HELP, OFFLOADS, TRUST_HELP
from draftsmith.kernels.divergence.kind import DIVERGENCE_HELP

# Of a round: of the text that it leaves, and of the rest of its draft.
KEPT_POSITIONS = ("accepted", "first-rejected", "bonus")
POSITIONS = (*KEPT_POSITIONS, "later-rejected")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    target: str = option(help="folder, Hub id or GGUF file of the target")
    prompts: str = option(
        "",
        "a file or folder of JSON lines, JSON, Parquet, CSV or text (a prompt per line), a "
        "dataset folder or Hub id, published:train (8,125 public prompts, in no suite of bench), "
        "stdlib:code, stdlib:prose or stdlib:tasks",
    )
    out: str = option(help="folder to write; a started one is resumed")
    self_prompts: int | None = option(
        None,
        "in place of --prompts: so many prompts that the target writes itself, behind the empty "
        "user turn of its chat template",
        limits=AT_LEAST_1,
    )
    self_prompts_tokens: int = option(
        128,
        "longest of these prompts; those that do not end by then are dropped",
        limits=AT_LEAST_1,
    )
    keep_answers: bool = option(
        False,
        "write no answers: train on the assistant turns, completions or plain text that the "
        "prompts hold already",
    )
    url: str | None = option(
        None,
        "an OpenAI-compatible server that answers in the target's place; it is asked for token ids",
    )
    model: str | None = option(None, "its name on that server; by default the first one listed")
    api_key: str | None = option(None, API_KEY_HELP)
    count: int | None = option(
        None,
        "how many prompts; without it all of them (one a document for stdlib)",
        limits=AT_LEAST_1,
    )
    prompt_tokens: int = option(
        64, "length of the prompts cut from documents (stdlib)", limits=AT_LEAST_1
    )
    max_tokens: int = option(128, "longest answer", limits=AT_LEAST_1)
    temperature: tuple[float, ...] = option(
        (1.0,), "0 is greedy; over several the answers are spread evenly", limits=NOT_NEGATIVE
    )
    thinking: str | None = option(
        None,
        "enable_thinking of the chat template: on, off, or both, over which the answers are spread "
        "[default: left to the template]",
        choices=("on", "off", "both"),
    )
    top_k: int = option(0, "0 is off", limits=NOT_NEGATIVE)
    top_p: float = option(1.0, "1 is off", limits=PART)
    seed: int = option(0, "of the prompts and of the answers", limits=NOT_NEGATIVE)
    split: str = option("all", "which part of the documents", choices=("all", "train", "held-out"))
    held_out: float = option(
        0.1, "share of the documents in the held-out part, decided by their names", limits=SHARE
    )
    chat: str = option(
        "auto", "wrap plain prompts in the chat template", choices=("auto", "always", "never")
    )
    prompts_split: str = option("train", "split of a prompts dataset")
    top_logprobs: int = option(
        0,
        "store the target's distribution as this many likeliest tokens and the tail; 64 is a good "
        "number",
        limits=NOT_NEGATIVE,
    )
    store_taps: str | None = option(
        None,
        "store the target's hidden states beside the answers, in this precision, for train "
        "--teacher stored",
        choices=("bf16", "fp8"),
    )
    taps: tuple[int, ...] | None = option(
        None, "raw layer ids to store [default: those an eagle3 draft reads]", limits=NOT_NEGATIVE
    )
    batch: int = option(
        16,
        "answers written (or asked for) at once; a kill costs at most twice as many",
        limits=AT_LEAST_1,
    )
    memory_gib: float | None = option(
        None,
        "most memory for keys and values; default: what the batch needs, at most 80 % of what a "
        "GPU has free, 2 GiB on a CPU",
        limits=POSITIVE,
    )
    shard: int = option(512, "answers per file", limits=AT_LEAST_1)
    dtype: str = option("auto", "of the target's weights, as served", choices=DTYPES)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    target_offload: str | None = option(None, OFFLOAD_HELP, choices=OFFLOADS)
    trust_remote_code: bool = option(False, TRUST_HELP)

    @property
    def temperatures(self) -> tuple[float, ...]:
        given = self.temperature
        return given if isinstance(given, tuple) else (given,)


@dataclass(frozen=True, kw_only=True)
class LearnUnroll:
    """Training-time unrolling, by the names of `train`."""

    steps: int = option(4, "draft positions unrolled in training", limits=AT_LEAST_1)
    decay: float = option(
        0.9, "weight of a step relative to the one before it; 1 counts all alike", limits=SHARE
    )


@dataclass(frozen=True, kw_only=True)
class LearnConfig:
    teacher: str = option(
        "live",
        "where the target's distributions are read, and the states that a draft reads: live, from "
        "a pass of the target; recorded, from the records alone, and the target is neither loaded "
        "nor run",
        choices=("live", "recorded"),
    )
    taps_gib: float = option(
        4.0,
        "most memory of the host for the target's hidden states of the texts kept: recorded ones, "
        "or those of its own passes, each of which then reads a text once",
        limits=POSITIVE,
    )
    dtype: str = option(
        "auto",
        "of a step's arithmetic, over float32 weights; auto is bfloat16 autocast where the machine "
        "is fast at it",
        choices=("auto", "float32", "bfloat16"),
    )
    optimizer: str = option(
        "adamw",
        "muon trains the matrices inside the draft by Muon and all else by AdamW, as in train",
        choices=("adamw", "muon"),
    )
    lr: float = option(5e-4, "learning rate, constant after a few warm-up steps", limits=POSITIVE)
    warmup_steps: int = option(10, "steps over which the learning rate rises", limits=NOT_NEGATIVE)
    batch: int = option(8, "sequences per step", limits=AT_LEAST_1)
    steps: int = option(8, "optimizer steps per update", limits=AT_LEAST_1)
    fresh: int = option(8, "new sequences that start an update", limits=AT_LEAST_1)
    most_fresh: int | None = option(
        None,
        "most new sequences of an update; others wait for the next ones, and reading waits with "
        "them, so that each is used. Without it one update, of as many steps, is made of all that "
        "came",
        limits=AT_LEAST_1,
    )
    replay: float = option(
        0.8,
        "share of each batch drawn from older traffic, half from the latest texts, half from the "
        "reservoir",
        limits=BELOW_1,
    )
    reservoir: int = option(
        512, "sequences kept for replay, a uniform sample of all", limits=AT_LEAST_1
    )
    positions: tuple[str, ...] = option(KEPT_POSITIONS, "positions trained on", choices=POSITIONS)
    divergence: str = option("forward-kl", DIVERGENCE_HELP)
    unroll: LearnUnroll = option(help="training-time unrolling", factory=LearnUnroll)
    average: float = option(
        0.96,
        "decay per step of the mean of the candidate's weights, which is what is scored and "
        "published; 0: the last ones",
        limits=BELOW_1,
    )
    budget: float = option(
        1.0,
        "most of the wall time that learning may take, for a device that it shares with a server",
        limits=PART,
    )
    max_length: int = option(
        1024, "longest sequence; longer ones are cut at the end", limits=AT_LEAST_1
    )


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    every: int = option(2, "updates between two gate decisions", limits=AT_LEAST_1)
    requests: int = option(12, "fewest held-out requests to decide on", limits=AT_LEAST_1)
    window: int = option(48, "newest held-out requests that are scored", limits=AT_LEAST_1)
    held_out: float = option(
        0.25, "share of the requests that is never trained on, by hash of the prompt", limits=INSIDE
    )
    held_out_by: str = option(
        "prompt",
        "what is held out whole: prompts, or requests where few prompts are asked again and again, "
        "as rollouts of a policy are",
        choices=("prompt", "request"),
    )
    fresh: bool = option(
        True,
        "new training texts count as evidence too: the newest gate.window of an update are scored "
        "before the candidate is trained on them; a publication needs its gain on held-out "
        "requests all the same",
    )
    error: float = option(
        0.05,
        "chance of publishing any candidate that is no better, between two promotions",
        limits=INSIDE,
    )
    gain: float = option(0.002, "least gain in alpha worth a swap", limits=BELOW_1)
    drop: float = option(
        0.03,
        "loss of live alpha that calls for a rollback, if the evidence holds; against the first "
        "version, gate.gain does",
        limits=BELOW_1,
    )
    floor: float = option(
        0.3,
        "alpha under a changed target below which an older draft is withheld, until it has learned",
        limits=SHARE,
    )


@dataclass(frozen=True, kw_only=True)
class DriftConfig:
    false_alarms: float = option(
        0.02, "alarms per hour, over all classes, while nothing changes", limits=POSITIVE
    )
    drop: float = option(0.05, "loss of a class's acceptance that is no alarm", limits=BELOW_1)
    patience: int = option(
        32,
        "gate decisions in a row without a promotion after which learning rests until an alarm; "
        "0: never",
        limits=NOT_NEGATIVE,
    )


@dataclass(frozen=True, kw_only=True)
class RetentionConfig:
    # Below the size of a few shards, unread records would be deleted.
    bytes: int = option(
        2 << 30, "size of the buffer; what was learned from goes first", limits=Limits(1 << 20)
    )
    age_s: float = option(
        7 * 86400.0, "age at which records are deleted", limits=Limits(0, math.inf, "[]")
    )
    versions: int = option(
        20, "versions kept beside the live one, its parent and the first", limits=NOT_NEGATIVE
    )


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    target: str = option(
        help="folder or Hub id of the target, the one the servers run, or a file that names a "
        "folder; new weights there are read while the learner runs"
    )
    draft: str = option(help="draft checkpoint to start from; published as the first version")
    buffer: str = option(help="folder or fsspec URL the servers write records to (serve --learn)")
    versions: str = option(help="folder to publish versions in (serve --versions)")
    learn: LearnConfig = option(factory=LearnConfig)
    gate: GateConfig = option(factory=GateConfig)
    drift: DriftConfig = option(factory=DriftConfig)
    retention: RetentionConfig = option(factory=RetentionConfig)
    poll_s: float = option(1.0, "pause when there is nothing new", limits=SECONDS)
    save_s: float = option(
        20.0,
        "least time between two saves of the learner's state; also saved around every publication",
        limits=NOT_NEGATIVE,
    )
    until_idle_s: float | None = option(
        None,
        "stop when the buffer brought nothing for so long; without it run until SIGTERM",
        limits=NOT_NEGATIVE,
    )
    max_updates: int | None = option(None, "stop after so many updates in all", limits=NOT_NEGATIVE)
    threads: int | None = option(
        None, "CPU threads [default: half of those that torch has]", limits=Limits(1, 1024, "[]")
    )
    status_port: int | None = option(
        None,
        "serve the numbers of the status as Prometheus text at /metrics of this port; 0 finds one",
        limits=PORT,
    )
    status_host: str = option("127.0.0.1", "address of that port")
    seed: int = option(0, "of the replay", limits=NOT_NEGATIVE)
    dtype: str = option("auto", "of the target's weights, as served", choices=DTYPES)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    target_offload: str | None = option(None, OFFLOAD_HELP, choices=OFFLOADS)
    trust_remote_code: bool = option(False, TRUST_HELP)


@dataclass(frozen=True, kw_only=True)
class ForgetConfig:
    buffer: str = option(help="folder or fsspec URL the servers write records to")
    request: str = option(help="id of the answer, as the server gave it (cmpl-... or chatcmpl-...)")
