"""Private and public names that the plugin reads, in vLLM's own source: of the environment that
`DRAFTSMITH_VLLM_PYTHON` names, and of every folder in `DRAFTSMITH_VLLM_SOURCES` (by ":"), such as
an unpacked wheel. Nothing of it is imported: the second runner's needs a GPU."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from draftsmith.fleet.recording.seam import FIRST, SECOND
from draftsmith.fleet.swaps.proposer import V2
from draftsmith.train.export.vllm_faults import SHARED_NOISE


def sources() -> list[Path]:
    """Folders named `vllm`."""
    found = [
        Path(name) / "vllm"
        for name in os.environ.get("DRAFTSMITH_VLLM_SOURCES", "").split(":")
        if name
    ]
    python = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
    if python:
        found += Path(python).parents[1].glob("lib/python*/site-packages/vllm")
    return found


pytestmark = [
    pytest.mark.long,
    pytest.mark.parametrize(
        "source",
        sources()
        or [pytest.param(None, marks=pytest.mark.skip(reason="no source of vLLM is here"))],
        ids=str,
    ),
]

GPU = "v1/worker/gpu"


class Read(NamedTuple):
    """Names that one class of a file has: fields, methods, or attributes that it sets."""

    path: str
    owner: str
    names: tuple[str, ...]


BOTH = [
    Read("v1/core/sched/output.py", "SchedulerOutput",
         ("scheduled_new_reqs", "scheduled_cached_reqs", "finished_req_ids")),
    Read("v1/core/sched/output.py", "NewRequestData",
         ("req_id", "prompt_token_ids", "sampling_params", "mm_features", "prompt_embeds",
          "lora_request", "prefill_token_ids", "block_ids", "num_computed_tokens")),
    Read("v1/core/sched/output.py", "CachedRequestData",
         ("resumed_req_ids", "all_token_ids", "new_block_ids")),
    Read("v1/outputs.py", "ModelRunnerOutput", ("req_ids", "sampled_token_ids")),
    Read("v1/outputs.py", "AsyncModelRunnerOutput", ("get_output",)),
    Read("v1/worker/worker_base.py", "WorkerBase", ("rank", "vllm_config", "model_runner")),
    Read("v1/worker/gpu_worker.py", "Worker",
         ("execute_model", "sample_tokens", "compile_or_warm_up_model", "shutdown", "sleep",
          "wake_up", "start_draft_weight_update", "finish_weight_update")),
    Read("v1/engine/core.py", "EngineCore", ("set_weight_version", "collective_rpc")),
    Read("plugins/endpoint_plugins/interface.py", "EndpointPlugin",
         ("attach_router", "init_state")),
]  # fmt: skip
FIRST_RUNNER = [
    Read("v1/worker/gpu_model_runner.py", "GPUModelRunner",
         ("get_model", "get_draft_model", "rejection_sampler", "drafter", "input_batch",
          "_input_fits_in_drafter", "take_draft_token_ids", "use_async_scheduling")),
    Read("v1/spec_decode/metadata.py", "SpecDecodeMetadata",
         ("draft_token_ids", "num_draft_tokens", "target_logits_indices")),
    Read("v1/spec_decode/llm_base_proposer.py", "SpecDecodeBaseProposer",
         ("_get_model", "hidden_size", "propose")),
]  # fmt: skip
SECOND_RUNNER = [
    Read(f"{GPU}/model_runner.py", "GPUModelRunner",
         ("get_model", "get_draft_model", "rejection_sampler", "speculator", "req_states",
          "sampler")),
    Read(f"{GPU}/input_batch.py", "InputBatch",
         ("req_ids", "num_reqs", "num_tokens", "idx_mapping_np", "is_prefilling_np", "cu_num_logits_np",
          "expanded_idx_mapping", "expanded_local_pos", "input_ids", "logits_indices")),
    Read(f"{GPU}/states.py", "RequestState", ("num_computed_prefill_tokens", "prefill_len")),
    Read(f"{GPU}/sample/sampler.py", "Sampler", ("sampling_states",)),
    Read(f"{GPU}/sample/states.py", "SamplingStates", ("temperature",)),
    Read(f"{GPU}/spec_decode/speculator.py", "DraftModelSpeculator",
         ("load_draft_model", "draft_logits", "draft_tokens", "hidden_size")),
]  # fmt: skip


@cache
def read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def class_of(source: Path, path: str, name: str) -> ast.ClassDef:
    tree = read(source / path)
    return next(one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name == name)


def names_of(owner: ast.ClassDef) -> Iterator[str]:
    for one in ast.walk(owner):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            yield one.name
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield one.target.id
        elif isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
            yield one.attr


def parameters(source: Path, path: str, owner: str, name: str) -> list[str]:
    call = next(
        one
        for one in class_of(source, path, owner).body
        if isinstance(one, ast.FunctionDef) and one.name == name
    )
    return [one.arg for one in call.args.args if one.arg != "self"]


def missing(source: Path, reads: list[Read]) -> list[str]:
    return [
        f"{one.path}: {one.owner}.{name}"
        for one in reads
        for name in one.names
        if name not in set(names_of(class_of(source, one.path, one.owner)))
    ]


def test_both_runners_have_what_is_read(source: Path) -> None:
    # vLLM 0.26 gives its weights no version.
    assert [name for name in missing(source, BOTH) if "set_weight_version" not in name] == []


def test_the_first_runner_has_what_is_read(source: Path) -> None:
    assert missing(source, FIRST_RUNNER) == []
    found = parameters(source, "v1/sample/rejection_sampler.py", "RejectionSampler", "forward")
    assert found[: len(FIRST)] == FIRST
    path = "v1/spec_decode/llm_base_proposer.py"
    found = parameters(source, path, "SpecDecodeBaseProposer", "propose")
    assert {"target_token_ids", "target_hidden_states"} <= set(found)


def test_the_second_runner_has_what_is_read(source: Path) -> None:
    assert missing(source, SECOND_RUNNER) == []
    path = f"{GPU}/spec_decode/speculator.py"
    found = parameters(source, path, "BaseSpeculator", "propose")
    assert found[:5] == list(inspect.signature(V2.given).parameters)[:5]
    path = f"{GPU}/spec_decode/rejection_sampler.py"
    assert parameters(source, path, "RejectionSampler", "__call__")[: len(SECOND)] == SECOND
    path = f"{GPU}/spec_decode/speculator.py"
    found = parameters(source, path, "DraftModelSpeculator", "load_draft_model")
    assert found == ["target_model", "target_attn_layer_names"]


def test_a_drafts_logits_are_kept_as_the_second_runner_reads_them(source: Path) -> None:
    """Divided by the temperature where they are called processed; in the cache before it."""
    text = (source / GPU / "sample" / "gumbel.py").read_text(encoding="utf-8")
    (function,) = [
        one
        for one in ast.walk(ast.parse(text))
        if isinstance(one, ast.FunctionDef) and one.name == "gumbel_sample"
    ]
    given = {one.arg for one in function.args.args}
    assert len(given & {"output_processed_logits", "logits_cache"}) == 1
    verify = (source / GPU / "spec_decode" / "rejection_sampler_utils.py").read_text("utf-8")
    assert ("logits_cache" in given) == ("draft_logits is stored pre-temperature" in verify)


def test_the_releases_whose_drafts_share_their_noise_are_those_of_the_table(source: Path) -> None:
    release = re.search(r"version = '(.*)'", (source / "_version.py").read_text("utf-8"))
    assert release is not None
    is_salted = "is_drafting" in (source / GPU / "sample" / "gumbel.py").read_text("utf-8")
    assert SHARED_NOISE.is_in(release[1]) != is_salted


def test_functions_that_swaps_call_are_there(source: Path) -> None:
    reload = source / "model_executor" / "model_loader" / "reload"
    names = {
        one.name
        for path in reload.glob("*.py")
        for one in ast.walk(read(path))
        if isinstance(one, ast.FunctionDef)
    }
    assert names >= {
        "initialize_layerwise_reload", "finalize_layerwise_reload", "get_layerwise_info"
    }  # fmt: skip
    groups = "".join(path.read_text("utf-8") for path in (source / "plugins").rglob("*.py"))
    assert "vllm.general_plugins" in groups and "vllm.endpoint_plugins" in groups
