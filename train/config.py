"""Options of `draftsmith train`, `eval`, `doctor`, `plan`, `run` and `export`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.config import AT_LEAST_1, BELOW_1, NOT_NEGATIVE, POSITIVE, SHARE, Limits, option
from draftsmith.drafters.config import DTYPES, OFFLOAD_HELP, OFFLOADS, SAMPLINGS, TRUST_HELP, Pair
from draftsmith.drafters.options import OPTIONS, DraftOptions
from draftsmith.kernels.divergence.kind import DIVERGENCE_HELP
from draftsmith.prompts.suites import MOST_HELP, SuiteOptions

FAMILIES = tuple(OPTIONS)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The schedule follows whichever of steps, epochs and minutes runs out first."""

    optimizer: str = option(
        "adamw",
        "muon trains the matrices inside the draft by Muon and all else by AdamW",
        choices=("adamw", "muon"),
    )
    lr: float = option(5e-4, "peak learning rate", limits=POSITIVE)
    warmup: float = option(0.04, "share of the run spent warming up", limits=SHARE)
    schedule: str = option(
        "cosine", "shape after the warm-up", choices=("cosine", "linear", "constant")
    )
    final: float = option(
        0.1, "last learning rate as a share of the peak (cosine and linear)", limits=SHARE
    )
    weight_decay: float = option(0.0, "decoupled weight decay of matrices", limits=NOT_NEGATIVE)
    max_grad_norm: float = option(
        1.0, "gradients are clipped to this norm; 0 switches clipping off", limits=NOT_NEGATIVE
    )


@dataclass(frozen=True, kw_only=True)
class UnrollConfig:
    """Training-time unrolling: the draft is fed its own states, as it will be when it drafts."""

    steps: int = option(4, "draft positions unrolled in training", limits=POSITIVE)
    decay: float = option(
        0.8, "weight of a step relative to the one before it; 1 counts all alike", limits=POSITIVE
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    family: str = option(help="what to train", choices=FAMILIES, positional=True)
    target: str = option(help="the target: a folder, Hub id or GGUF file of a causal LM")
    data: tuple[str, ...] = option(
        help="folders written by `draftsmith generate`, FOLDER[:WEIGHT]: one of weight 2 is read "
        "twice per epoch, of 0.5 half of it"
    )
    teacher: str = option(
        "live",
        "where taps and distributions come from: the running target, or what generate stored of "
        "it (--store-taps, --top-logprobs)",
        choices=("live", "stored"),
    )
    out: str = option(
        help="folder of the draft; holds its metrics and, under training/, its checkpoints"
    )
    init: str | None = option(
        None,
        "folder or Hub id of a draft of this family, ours or another trainer's, to train further "
        "[default: a new one]",
    )

    steps: int | None = option(None, "optimizer steps to run at most", limits=POSITIVE)
    epochs: float | None = option(
        None,
        "passes over the data at most (1 when neither steps nor minutes is given)",
        limits=POSITIVE,
    )
    minutes: float | None = option(
        None,
        "wall-clock minutes to train at most, evaluations among them, each of which takes a tenth "
        "at most; loading is not, nor the step and the checkpoint that end the run",
        limits=POSITIVE,
    )
    batch_size: int = option(
        8, "rows in one forward pass of one process, a sequence each unless packed", limits=POSITIVE
    )
    accumulate: int = option(1, "forward passes summed into one optimizer step", limits=POSITIVE)
    max_length: int = option(
        2048, "most tokens of a sequence; with packing, of a row", limits=POSITIVE
    )
    long: str = option(
        "cut",
        "longer texts are cut, or split into pieces, each after the first begun by a quarter of "
        "context that trains nothing",
        choices=("cut", "split"),
    )
    packing: bool = option(
        False,
        "fill each row with whole sequences that do not see each other, up to max_length tokens",
    )
    # With 1 nothing would be left to train on.
    held_out: float = option(
        0.05,
        "share of the data kept for evaluation, decided by a hash of the prompt",
        limits=BELOW_1,
    )
    with_prompts: bool = option(False, "train on the tokens of prompts too, for few answers")
    seed: int = option(
        0, "seed of the new draft and of the order of the data", limits=Limits(0, 2**32)
    )
    dtype: str = option(
        "auto",
        "of the arithmetic; auto is bfloat16 autocast where the machine is fast at it",
        choices=("auto", "float32", "bfloat16"),
    )
    deepspeed: str | None = option(
        None, "DeepSpeed JSON such as recipes/zero2.json; start under torchrun"
    )
    target_shares: int = option(
        1,
        "processes that hold one copy of the frozen target between them; more than 1 when it is "
        "too large",
        limits=POSITIVE,
    )
    target_offload: str | None = option(None, OFFLOAD_HELP, choices=OFFLOADS)
    target_server: str | None = option(
        None,
        "of a draft-lm: URL of an engine whose prompt_logprobs are read, as vLLM's, in place of a "
        "target here; --target then needs no weights",
    )
    target_logprobs: int = option(
        0,
        "with target_server: likeliest tokens per position that the loss reads, with their tail "
        "mass",
        limits=Limits(0, 1024, "[]"),
    )
    resume: bool = option(True, "go on from --out's newest checkpoint; --no-resume starts over")
    log_every: int = option(10, "steps between two lines of metrics.jsonl", limits=POSITIVE)
    save_every: int = option(
        200, "steps between two checkpoints, rounded up to a multiple of log_every", limits=POSITIVE
    )
    eval_every: int | None = option(
        None,
        "steps between two evaluations on held-out prompts; 0 evaluates at the end only [default: "
        "a fifth of the run, at least 200; with minutes or target_offload 0]",
        limits=NOT_NEGATIVE,
    )
    eval_prompts: int = option(
        32,
        "held-out prompts decoded by an evaluation; with 0 none is made and the last draft is kept",
        limits=NOT_NEGATIVE,
    )
    eval_tokens: int = option(64, "tokens written to each of them, at T=0 and T=1", limits=POSITIVE)
    report_to: tuple[str, ...] = option(
        (), "trackers beside metrics.jsonl, as transformers names them: tensorboard, wandb, ..."
    )
    trust_remote_code: bool = option(False, TRUST_HELP)

    draft: DraftOptions | None = option(None, "a new draft of the family: layers, taps and tables")
    optim: OptimConfig = option(help="optimizer and schedule", factory=OptimConfig)
    divergence: str = option("forward-kl", DIVERGENCE_HELP)
    unroll: UnrollConfig = option(help="training-time unrolling", factory=UnrollConfig)


DRAFT_SAMPLING_HELP = (
    "drafts of the engine that will serve: drawn from the draft's distribution, as here, or its "
    "likeliest tokens, as vLLM and SGLang do unless set otherwise"
)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(SuiteOptions):
    target: str = option(help="the target: a folder, Hub id or GGUF file of a causal LM")
    draft: str = option(help="folder or Hub id of a trained draft")
    data: tuple[str, ...] = option(
        (),
        "folders written by `draftsmith generate`; their held-out prompts are used; or give suite",
    )
    temperature: tuple[float, ...] = option(
        (0.0, 1.0), "temperatures to evaluate at", limits=NOT_NEGATIVE
    )
    prompts: int = option(64, "prompts read at most", limits=AT_LEAST_1)
    k: int | None = option(
        None,
        "draft tokens per round [default: as many as the draft was trained for, else 4]",
        limits=AT_LEAST_1,
    )
    draft_sampling: str = option("sampled", DRAFT_SAMPLING_HELP, choices=SAMPLINGS)
    max_tokens: int | None = option(
        None,
        f"most tokens the target writes per prompt where fresh answers are needed; {MOST_HELP}",
        limits=AT_LEAST_1,
    )
    held_out: float = option(
        0.05, "share of the data that training kept back; 1 reads all of it", limits=SHARE
    )
    seed: int = option(0, "seed of sampled answers and of the bootstrap", limits=NOT_NEGATIVE)
    batch_size: int = option(8, "sequences in one forward pass", limits=AT_LEAST_1)
    max_length: int = option(2048, "longer sequences are cut to so many tokens", limits=AT_LEAST_1)
    dtype: str = option("auto", "of the target's weights, as served", choices=DTYPES)
    out: str | None = option(None, "write the figures to this JSON file, a page beside it (.html)")
    store: bool = option(
        False, "write the figures into the draft's draftsmith.json, from where `export` takes them"
    )
    target_offload: str | None = option(None, OFFLOAD_HELP, choices=OFFLOADS)
    trust_remote_code: bool = option(False, TRUST_HELP)


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Pair):
    target: str | None = option(
        None, "folder or Hub id of the target [default: the one that the data names]"
    )
    data: tuple[str, ...] = option((), "generated datasets to check against both")
    rows: int = option(256, "rows of the data to read, spread over all of it", limits=AT_LEAST_1)
    show: int = option(
        2, "rows of the data to print whole, trained tokens in [[ ]]", limits=NOT_NEGATIVE
    )
    max_length: int = option(
        2048, "training length in tokens beyond which a row is cut", limits=Limits(2)
    )
    sequences: int = option(
        8, "concurrent sequences that the memory estimate assumes", limits=AT_LEAST_1
    )
    target_offload: str | None = option(None, OFFLOAD_HELP, choices=OFFLOADS)
    url: str | None = option(
        None, "instead of all else: a running draftsmith server, http://127.0.0.1:8000"
    )
    json: bool = option(False, "print the findings as JSON")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    target: str = option(help="the target: a folder, Hub id or GGUF file of a causal LM")
    data: tuple[str, ...] = option(
        (), "folders written by `draftsmith generate`, FOLDER[:WEIGHT]: their tokens size the run"
    )
    families: tuple[str, ...] = option(
        (), "families to plan [default: that of the recipe, or all]", choices=FAMILIES
    )
    recipe: str | None = option(
        None, "recipe of `train` whose batch, unroll, shape and length are planned"
    )
    answers: int = option(50000, "answers to train on, where no data is given", limits=AT_LEAST_1)
    tokens: int = option(512, "tokens of an answer, where no data is given", limits=AT_LEAST_1)
    epochs: float | None = option(
        None, "passes over the data [default: the recipe's, or 1]", limits=POSITIVE
    )
    target_offload: str | None = option(None, OFFLOAD_HELP, choices=OFFLOADS)
    trust_remote_code: bool = option(False, TRUST_HELP)
    json: bool = option(False, "print JSON instead of a table")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    recipe: str = option(
        help="YAML of settings and stages, such as recipes/pipelines/direct-alignment.yaml",
        positional=True,
    )
    set: tuple[str, ...] = option(
        (), "a setting of the recipe, target=T, or an option of a stage, pretrain.steps=200"
    )
    out: str | None = option(
        None, "folder of the stages' results and the report [default: runs/RECIPE]"
    )
    dry_run: bool = option(
        False, "check the recipe and print its commands, and which stages would be kept"
    )


LAYOUTS = ("vllm", "sglang", "speculators", "hf", "gguf", "openvino")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    draft: str = option(help="the draft checkpoint, a folder or a Hub id", positional=True)
    to: str = option(help="whose layout to write", choices=LAYOUTS)
    out: str = option(help="folder to write; replaced whole if it is an earlier export")
    target: str | None = option(
        None, "folder or Hub id of the target [default: the one the draft was trained for]"
    )
    trust_remote_code: bool = option(False, TRUST_HELP)
    with_target: bool = option(
        False, "write the target beside the draft, where the layout holds targets (gguf, openvino)"
    )
    speculative_tokens: int | None = option(
        None,
        "draft tokens per round that the export recommends to the engine [default: as many as the "
        "draft was trained for, else 3]",
        limits=AT_LEAST_1,
    )
    push: str | None = option(None, "upload the export to this Hub repository, user/repo")
    private: bool = option(False, "make the Hub repository private when --push creates it")
