"""A target, its greedy answers and drafts that know part of them by heart, for engines of others."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.mtp_layouts import layout_of, text_values
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import tensor_names
from draftsmith.files import read_json
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from tests.forked import cli

K, MAX_TOKENS = 3, 48
# Heads of 32: vLLM's attention for CPUs has no smaller ones.
FAMILIES = {
    "eagle3": ("draft.taps=[1,2,3]", "draft.draft_vocab_size=250"),
    "p-eagle": ("draft.taps=[1,2,3]", "draft.num_hidden_layers=2"),
    "mtp": (),
    "eagle1": (),
    "medusa": ("draft.num_heads=3", "unroll.steps=3"),
    "dflash": ("draft.block_size=4", "unroll.steps=3"),
    "dspark": ("draft.block_size=4", "unroll.steps=3"),
    "draft-lm": ("draft.num_layers=2", "draft.hidden_size=64", "draft.num_attention_heads=2"),
}


SHAPE: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip


def with_noise(model: Path, folder: Path, share: float) -> Path:
    """A copy of a model with noise of a share of its weights' spread."""
    shutil.copytree(model, folder)
    noisy = LlamaForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in noisy.parameters():
            if weight.ndim > 1:
                weight.add_(torch.randn_like(weight) * share * weight.std())
    noisy.save_pretrained(folder)
    return folder


def llama_workshop(made: pytest.TempPathFactory, tiny_target: Callable[..., str]) -> Path:
    """`target`, and `data`: its greedy answers to 24 prompts. DRAFTSMITH_WORKSHOP names a folder of
    another Llama that has these and a `draft-eagle3`, evaluated as in `trained`."""
    if given := os.environ.get("DRAFTSMITH_WORKSHOP"):
        return Path(given).resolve()
    folder, config = made.mktemp("workshop"), LlamaConfig(**SHAPE, head_dim=32)
    save_target(folder, partial(LlamaForCausalLM, config), tiny_target)
    return folder


def save_target(
    folder: Path, make: Callable[[], PreTrainedModel], tiny_target: Callable[..., str]
) -> None:
    """With weights that are far larger than an untrained model's, and data."""
    save_model(folder / "target", make, tiny_target)
    answer(folder)


def save_model(
    folder: Path,
    make: Callable[[], PreTrainedModel],
    tiny_target: Callable[..., str],
    *,
    seed: int = 0,
    scale: float = 1.5,
) -> None:
    """Greedy texts must depend on all that came before, so its weights are large."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Ernie's bias of its experts, which vLLM on CPUs takes for another one, stays 0.
            if "correction_bias" in name:
                continue
            if parameter.ndim > 1:
                parameter.normal_(0.0, scale * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_target("llama")).save_pretrained(folder)


def answer(folder: Path) -> None:
    draftsmith(
        folder, "generate", "--target", "target", "--prompts", "stdlib:code", "--count", "24",
        "--prompt-tokens", "16",
        "--max-tokens", str(MAX_TOKENS), "--temperature", "0", "--out", "data",
    )  # fmt: skip


def python_of(variable: str) -> str:
    """Of the environment of a library of others."""
    python = os.environ.get(variable)
    assert python, f"{variable} is not set: run scripts/test --all, which makes what it names"
    return python


def run_python(command: Sequence[str | Path], timeout_s: float = 900, **options: Any) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)
    assert finished.returncode == 0, (finished.stdout + finished.stderr)[-5000:]


def draftsmith(folder: Path, *arguments: str) -> None:
    run_python(cli(*arguments), cwd=folder)


def texts(folder: Path, data: str = "data") -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of every row of the data."""
    rows = [
        row
        for shard in sorted((folder / data).glob("*.parquet"))
        for row in pyarrow.parquet.read_table(shard).to_pylist()
    ]
    begun = [(row["input_ids"], row["loss_mask"].index(1)) for row in rows]
    return [(ids[:begin], ids[begin:]) for ids, begin in begun]


def trained(folder: Path, family: str) -> Path:
    """The family's draft, trained until it knows part of the answers by heart, with its offline
    evaluation recorded."""
    draft = folder / f"draft-{family}"
    init = ("--init", "target") if brings_module(folder / "target") else ()
    if not draft.exists():
        draftsmith(
            folder, "train", family, "--target", "target", "--data", "data", "--out", draft.name,
            "--steps", "300",
            "--held-out", "0.05", "--dtype", "float32", "optim.lr=3e-3", *FAMILIES[family], *init,
        )  # fmt: skip
        draftsmith(
            folder, "eval", "--target", "target", "--draft", draft.name, "--data", "data",
            "--temperature", "0",
            "--held-out", "1", "--k", str(K), "--store",
        )  # fmt: skip
    return draft


def brings_module(target: Path) -> bool:
    config = read_json(target / "config.json")
    layout = layout_of(config)
    return layout is not None and layout.is_in(tensor_names(target), text_values(config))


def exported(folder: Path, family: str, engine: str, *more: str) -> str:
    out = f"{family}-{engine}"
    draft = trained(folder, family)
    flags = ("--to", engine, "--out", out, "--target", "target", "--speculative-tokens", str(K))
    draftsmith(folder, "export", draft.name, *flags, *more)
    return out


def predicted_tau(folder: Path, family: str) -> dict[str, float]:
    """value, and its 95 % interval: low, high"""
    record = read_json(trained(folder, family) / "draftsmith.json")
    (evaluation,) = (one for one in record["evaluation"] if one["temperature"] == 0)
    assert evaluation["k"] == K
    return evaluation["tau"]


class Served(NamedTuple):
    tau: float
    # of all requests, those that drafted nothing because one token was left included, as vLLM
    # counts
    rounds: int


def served(folder: Path, family: str, *, temperature: float = 0.0, repeats: int = 1) -> Served:
    """The same prompts and draft in our own engine."""
    target = Target.load(folder / "target")
    draft = checkpoint.load(trained(folder, family), target)
    engine = build_engine(target, draft, EngineConfig(k=K, max_batch=8))
    prompts = [prompt for prompt, _ in texts(folder)] * repeats
    sampling = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS)
    answers = engine.generate(prompts, sampling)
    counts = engine.stats.acceptance
    assert counts.tau is not None
    # The first token of an answer comes with its prompt.
    undrafted = sum(len(answer.tokens) - 1 for answer in answers) - counts.num_committed
    return Served(counts.tau, counts.rounds + undrafted)


def check_accepted(engine: str, folder: Path, family: str, found: dict[str, Any]) -> None:
    """What another engine accepted of the family's draft is what was predicted offline, and its
    rounds are those of our own."""
    predicted, here = predicted_tau(folder, family), served(folder, family)
    there, value = 1 + found["accepted"] / found["rounds"], predicted["value"]
    print(
        f"{family}: tau {there:.3f} in {engine}, {here.tau:.3f} served here, {value:.3f} "
        f"({predicted['low']:.3f}-{predicted['high']:.3f}) predicted offline; "
        f"{found['rounds']} rounds, {here.rounds} here"
    )
    assert value > 1.3, "the draft learned too little for the comparison to mean anything"
    # The two end a text differently: another engine's first token costs no round and its last
    # round may overshoot, at most one round of each answer.
    ends = len(texts(folder)) / found["rounds"]
    assert abs(there / value - 1) < ends
    # The rounds are the same: engines that draft the same need as many. What is left is rounding,
    # which may fork a text.
    assert abs(found["rounds"] / here.rounds - 1) < 0.02


def check_plain(
    folder: Path, found: dict[str, Any], *, earlier: int = 0, later: int = 0
) -> dict[str, Any]:
    """What another engine generates without a draft, which must be the answers in the data, or a
    prediction from those would mean nothing. Two implementations round differently: a greedy text
    forks where two logits agree to the last digits. The engine may end so many tokens `earlier` or
    `later`."""
    same = sum(
        theirs[: len(ours)] == ours[: len(theirs)] and -earlier <= len(theirs) - len(ours) <= later
        for theirs, (_, ours) in zip(found["tokens"], texts(folder), strict=True)
    )
    assert same >= 22
    return found


def check_shifted(folder: Path, found: dict[str, Any], plain: dict[str, Any]) -> None:
    """The negative control of `check_accepted`, an EAGLE-3 export with its taps off by one: the text
    stays right, and fewer tokens are accepted."""
    assert found["tokens"] == plain["tokens"]
    tau = 1 + found["accepted"] / found["rounds"]
    assert tau < 0.95 * predicted_tau(folder, "eagle3")["value"]
