"""Names that options have in vLLM, llama.cpp, TRL and speculators, taken for ours. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from draftsmith.errors import UserError

# Peers' name -> ours. An option of ours that has the name itself comes first.
NAMES = {
    "model": "target",
    "m": "target",
    "model-name-or-path": "target",
    "verifier-name-or-path": "target",
    "target-model-path": "target",
    "speculative-model": "draft",
    "model-draft": "draft",
    "md": "draft",
    "spec-draft-n-max": "k",
    "num-speculative-tokens": "k",
    "served-model-name": "name",
    "max-model-len": "max_length",
    "ctx-size": "max_length",
    "c": "max_length",
    "max-seq-len": "max_length",
    "max-seq-length": "max_length",
    "max-num-seqs": "max_batch",
    "max-num-batched-tokens": "max_round_tokens",
    "max-new-tokens": "max_tokens",
    "max-concurrency": "concurrency",
    "enable-prefix-caching": "prefix_cache=true",
    "no-enable-prefix-caching": "no_prefix_cache",
    "num-prompts": "count",
    "num-samples": "count",
    "output-dir": "out",
    "data-path": "data",
    "suite-file": "suite",
    "lr": "optim.lr",
    "learning-rate": "optim.lr",
    "lr-scheduler-type": "optim.schedule",
    "warmup-ratio": "optim.warmup",
    "weight-decay": "optim.weight_decay",
    "max-grad-norm": "optim.max_grad_norm",
    "num-train-epochs": "epochs",
    "num-epochs": "epochs",
    "max-steps": "steps",
    "per-device-train-batch-size": "batch_size",
    "gradient-accumulation-steps": "accumulate",
    "ttt-steps": "unroll.steps",
    "ttt-length": "unroll.steps",
    "logging-steps": "log_every",
    "save-steps": "save_every",
    "eval-steps": "eval_every",
    "bf16": "dtype=bfloat16",
}

# Beginnings of peers' flags that nothing here is like -> what there is.
ABSENT = {
    "tensor-parallel": "draftsmith serves on one device; serve a target that needs several with "
    "vLLM, for which `draftsmith export --to vllm` writes the draft",
    "quantization": "a checkpoint's own quantisation is taken; give one that is quantised",
    "speculative-config": "its keys are options here: --draft, --k, --suffix",
    "ngram": "--suffix is what drafts from text here",
    "prompt-lookup": "--suffix is what drafts from text here",
    "gpu-memory-utilization": "--memory-gib bounds keys and values here",
}


def ours_of(name: str) -> str:
    """Our name for a peers' flag, or for a peers' name in a section of ours
    (`optim.learning_rate`); "" for any other."""
    if name.startswith("-"):
        return NAMES.get(name.lstrip("-").replace("_", "-"), "")
    section, _, key = name.rpartition(".")
    ours = NAMES.get(key.replace("_", "-"), "")
    return ours if section and ours.startswith(f"{section}.") else ""


def in_our_names(
    argv: Sequence[str], flags: Collection[str], keys: Collection[str], tell: Callable[[str], None]
) -> list[str]:
    """`argv` with peers' names replaced, each given to `tell`, and with `--resume`
    taken where help has `--no-resume` alone. `flags` are the command's, as `--max-length`; `keys`
    are all its options, as `max_length` and `optim.lr`."""
    words, found = list(argv), []
    while words:
        word = words.pop(0)
        name, is_joined, value = word.partition("=")
        is_flag = name.startswith("--") and name not in flags
        for absent, instead in ABSENT.items() if is_flag else ():
            if name[2:].replace("_", "-").startswith(absent):
                raise UserError(f"{name} is given and {instead}")
        if is_flag and f"--no-{name[2:]}" in flags:
            # On by default, so that help names the flag that switches it off.
            found.append(f"{name[2:].replace('-', '_')}={value or 'true'}")
            continue
        ours = "" if name in flags or name in keys else ours_of(name)
        flag = "--" + ours.replace("_", "-")
        if not ours or not (flag in flags or ours.partition("=")[0] in keys):
            found.append(word)
            continue
        if "=" in ours:
            found.append(ours)
        elif flag in flags:
            found.append(f"{flag}={value}" if is_joined else flag)
        elif is_joined or words:
            found.append(f"{ours}={value if is_joined else words.pop(0)}")
        else:
            found.append(word)
        tell(f"{name} is {flag if flag in flags else ours} here")
    return found
