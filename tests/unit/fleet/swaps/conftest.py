"""A worker of the stand-in of vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.fleet.swaps.stand_in import (
    VOCAB,
    WIDTH,
    Drafter,
    Info,
    Runner,
    finalize,
    initialize,
    nothing,
    tensors_of_seed,
    write_version,
)


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of vLLM that a swap imports."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": nothing},
        "vllm.forward_context": {"set_forward_context": nothing},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": initialize,
            "finalize_layerwise_reload": finalize,
            "get_layerwise_info": lambda module: Info(),
        },
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def worker(fake_vllm: None, tmp_path: Path) -> Any:
    """A worker that serves version 1, whose embeddings are the target's."""
    served = write_version(tmp_path / "served", tensors_of_seed(1))
    model_config = SimpleNamespace(
        model=str(served), revision=None, dtype=torch.float32, get_vocab_size=lambda: VOCAB
    )
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=model_config, method="draft_model"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(data_parallel_size=1, world_size=1),
    )
    torch.manual_seed(0)
    target = torch.nn.Module()
    target.embed_tokens = torch.nn.Embedding(VOCAB, WIDTH)
    drafter = Drafter(lambda: tensors_of_seed(1), config)
    drafter.model.embed_tokens = target.embed_tokens
    drafter.model.attention.kv_cache = torch.ones(3, 5)
    return SimpleNamespace(model_runner=Runner(drafter, target), vllm_config=config, rank=0)
