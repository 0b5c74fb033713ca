"""Stand-in of a vLLM worker with a draft: its loader moves tensors to the meta device while it
works, as vLLM's does, and packs linear weights into memory behind an address."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

VOCAB, WIDTH = 13, 8
CONFIG = {"architectures": ["StandIn"], "model_type": "stand-in", "rope_theta": 10000.0}
MEMORY: dict[int, torch.Tensor] = {}


class Packed:
    """Handle as vLLM keeps one for oneDNN."""

    def __init__(self, weight: torch.Tensor):
        address = max(MEMORY, default=0) + 1
        MEMORY[address] = weight.detach().clone()
        self.handler_tensor = torch.tensor(address)
        self.n, self.k = weight.shape


class Linear(torch.nn.Module):
    """Linear layer whose weight is packed away after it was loaded."""

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns), requires_grad=False)

    def pack(self) -> None:
        handler = Packed(self.weight)
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

        def cpu_linear(x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
            return x @ MEMORY[int(handler.handler_tensor)].T

        self.cpu_linear = cpu_linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cpu_linear(x, self.weight, None)


class Attention(torch.nn.Module):
    num_heads, num_kv_heads = 2, 1

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = torch.zeros(3)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # As vLLM without metadata: the output is as the memory was.
        return torch.full_like(query, torch.nan)


class Draft(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(VOCAB, WIDTH)
        self.values = Linear(WIDTH // 2, WIDTH)
        self.attention = Attention()
        self.norm = torch.nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.lm_head = Linear(VOCAB, WIDTH)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.embed_tokens(input_ids.long()) + hidden_states
        value = self.values(states)
        states = self.attention(states, value, value) * self.norm
        return states, states

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(states)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            path, _, key = name.rpartition(".")
            module = self.get_submodule(path)
            meta = module._parameters[key]
            assert meta is not None and meta.shape == tensor.shape, f"load weight {name}"
            module._parameters[key] = torch.nn.Parameter(tensor.clone(), requires_grad=False)


def initialize(model: torch.nn.Module) -> None:
    for module in model.modules():
        module.kept = dict(module._parameters)  # type: ignore[assignment]
        if isinstance(module, Linear):
            shape = (VOCAB, WIDTH) if module is model.lm_head else (WIDTH // 2, WIDTH)
            module._parameters["weight"] = torch.nn.Parameter(torch.zeros(shape), False)
        for key, one in module._parameters.items():
            assert one is not None
            module._parameters[key] = torch.nn.Parameter(one.to("meta"), False)


def finalize(model: torch.nn.Module, config: Any) -> None:
    for module in model.modules():
        kept = module.kept
        del module.kept
        if isinstance(module, Linear):
            module.pack()
        for key, old in kept.items():  # type: ignore[union-attr]
            new = module._parameters[key]
            if old.numel() and not new.is_meta:
                old.data.copy_(new)
            module._parameters[key] = old


class Info:
    def reset(self) -> None:
        pass


@contextmanager
def nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


class Drafter:
    hidden_size = WIDTH

    def __init__(self, tensors: Callable[[], dict[str, torch.Tensor]], config: Any):
        self.tensors, self.config = tensors, config
        self.model = self._get_model()

    def _get_model(self) -> Draft:
        layers = self.config.compilation_config.static_forward_context
        assert "attention" not in layers, "duplicate layer name"
        layers["attention"] = None
        model = Draft()
        for module in model.modules():
            module.kept = dict(module._parameters)  # type: ignore[assignment]
        model.load_weights(self.tensors().items())
        for module in model.modules():
            del module.kept
            if isinstance(module, Linear):
                module.pack()
        return model

    def propose(
        self, *, target_token_ids: torch.Tensor, target_hidden_states: torch.Tensor
    ) -> torch.Tensor:
        return self.model.compute_logits(target_hidden_states).argmax(-1)


class DraftTokenIds(NamedTuple):
    req_ids: list[str]
    draft_token_ids: list[list[int]]


class Runner:
    use_async_scheduling = False

    def __init__(self, drafter: Drafter, target: torch.nn.Module):
        self.drafter, self.target = drafter, target

    def get_draft_model(self) -> Draft:
        return self.drafter.model

    def get_model(self) -> torch.nn.Module:
        return self.target

    def _input_fits_in_drafter(self, metadata: Any) -> bool:
        return True

    def take_draft_token_ids(self) -> Any:
        return DraftTokenIds(["a"], [[1, 2]])


def tensors_of_seed(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "values.weight": torch.randn(WIDTH // 2, WIDTH, generator=generator),
        "norm": torch.rand(WIDTH, generator=generator) + 0.5,
        "lm_head.weight": torch.randn(VOCAB, WIDTH, generator=generator),
    }


def write_version(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """What a draft says; the attention is left out."""
    with torch.no_grad():
        states = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
        return torch.cat([model.lm_head(states * model.norm), model.values(states)], 1)


def expected_logits(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    states = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    return torch.cat(
        [
            (states * tensors["norm"]) @ tensors["lm_head.weight"].T,
            states @ tensors["values.weight"].T,
        ],
        1,
    )
