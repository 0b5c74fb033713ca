"""The MLP speculator (arXiv 2404.19124): a recurrent network of one layer, from the target's final
state over the drafted tokens.

    state_s  = gelu(ln_s(proj_s(state_{s-1}) + mix * emb_s(x_{t+1+s}))),   state_{-1} = h_t
    logits of x_{t+2+s} = head_s(state_s)

`mix` balances the two so that neither dies out over the depths. With tied weights all depths share
emb, head, ln and, from the second on, proj; that is what is made here, other checkpoints are read,
and trained further.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.drafters.autoregressive.state import HeadStep
from draftsmith.drafters.layouts.folder import DraftFolder
from draftsmith.drafters.options import MlpOptions
from draftsmith.drafters.states.mlp_layout import (
    LSTM,
    PREFIX,
    ScaledNorm,
    check_config,
    normed,
    own_names,
    sizes_in,
)
from draftsmith.drafters.states.mlp_lstm import MlpLstm
from draftsmith.drafters.states.state_head import StateHead
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import (
    ReadBytes,
    load_into,
    read_config,
    read_weights,
    weight_bytes,
    write_weights,
)

ARCHITECTURE = "MLPSpeculatorPreTrainedModel"


class Mlp(StateHead):
    """Modules are numbered by depth; the last of each serves all later depths, so tied weights are
    lists of one (proj: two)."""

    family = "mlp"

    def __init__(
        self,
        target: Target,
        *,
        inner_size: int,
        num_predict: int,
        tied: bool = True,
        scale_input: bool = False,
    ):
        super().__init__()
        size = target.hidden_size
        self.vocab_size, self.max_depth = target.vocab_size, num_predict
        self.inner_size, self.tied, self.scale_input, self.state_size = (
            inner_size,
            tied,
            scale_input,
            size,
        )
        copies = 1 if tied else num_predict
        self.emb = nn.ModuleList(nn.Embedding(target.vocab_size, inner_size) for _ in range(copies))
        sizes = [size, *[inner_size] * (min(2, num_predict) - 1 if tied else num_predict - 1)]
        self.proj = nn.ModuleList(nn.Linear(width, inner_size, bias=False) for width in sizes)
        self.ln = nn.ModuleList(ScaledNorm(inner_size) for _ in range(copies))
        self.head = nn.ModuleList(
            nn.Linear(inner_size, target.vocab_size, bias=False) for _ in range(copies)
        )
        state_weight = 0.5 ** (0.5 / num_predict)
        self.mix = math.sqrt((1 - state_weight**2) * (inner_size / 2)) / state_weight
        self.to(target.device)

    @classmethod
    def matches(cls, draft: DraftFolder, target: Target | None = None) -> bool:
        return draft.config.get("model_type") == "mlp_speculator"

    @classmethod
    def create(
        cls,
        options: MlpOptions,
        target: Target,
        *,
        seed: int,
        token_counts: torch.Tensor | None = None,
    ) -> Mlp:
        """`token_counts` is not needed: the vocabulary is the target's."""
        inner_size = options.inner_size or target.hidden_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drafter = cls(
                target,
                inner_size=inner_size,
                num_predict=options.num_predict,
                scale_input=options.scale_input,
            )
            for module in drafter.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, 0.0, inner_size**-0.5)
        return drafter

    def begin(self, taps: torch.Tensor) -> torch.Tensor:
        taps = taps.to(self.head[0].weight.dtype)
        return normed(taps) / math.sqrt(2) if self.scale_input else taps

    def advance(self, state: torch.Tensor, tokens: torch.Tensor, depth: int) -> HeadStep:
        mixed = at(self.proj, depth)(state) + self.mix * at(self.emb, depth)(tokens)
        state = nn.functional.gelu(at(self.ln, depth)(mixed))
        return HeadStep(next_hidden=state, head_input=state)

    def head_at(self, depth: int) -> torch.Tensor:
        return at(self.head, depth).weight

    @property
    def has_own_heads(self) -> bool:
        return len(self.head) > 1

    def head_weight(self) -> torch.Tensor:
        return self.head[0].weight

    def read_bytes(self) -> ReadBytes:
        """The mean over its depths, whose modules may be their own."""
        depths = range(self.max_depth)
        read = [
            weight_bytes([at(self.proj, depth), at(self.ln, depth), at(self.head, depth)])
            for depth in depths
        ]
        return ReadBytes(proposal=0, token=sum(read) // self.max_depth)

    def save(self, folder: Path) -> None:
        write_weights(
            Path(folder),
            self.portable_config(),
            self.portable_tensors(),
        )

    def portable_tensors(self) -> dict[str, torch.Tensor]:
        return {PREFIX + name: value for name, value in self.state_dict().items()}

    def portable_config(self) -> dict[str, Any]:
        """Config of IBM's checkpoints, which vLLM read while it served them."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "mlp_speculator",
            "vocab_size": self.vocab_size,
            "emb_dim": self.state_size,
            "inner_dim": self.inner_size,
            "n_predict": self.max_depth,
            "n_candidates": self.max_depth,
            "top_k_tokens_per_head": [1] * self.max_depth,
            "tie_weights": self.tied,
            "scale_input": self.scale_input,
            "dtype": str(self.head[0].weight.dtype).removeprefix("torch."),
        }

    @classmethod
    def load(cls, folder: Path, target: Target) -> Mlp | MlpLstm:
        folder = Path(folder)
        values = sizes_in(read_config(folder), folder)
        check_config(values, target, folder)
        if values["method"] == LSTM:
            return MlpLstm.read(folder, values, target)
        drafter = cls(
            target,
            inner_size=values["inner_dim"],
            num_predict=values["n_predict"],
            tied=bool(values.get("tie_weights")),
            scale_input=bool(values.get("scale_input")),
        )
        tensors = own_names(read_weights(folder))
        if drafter.tied:
            tensors = without_copies(tensors, drafter.state_dict().keys())
        drafter.to(next(iter(tensors.values())).dtype)
        load_into(drafter, tensors, str(folder))
        return drafter


def at(modules: nn.ModuleList, depth: int) -> nn.Module:
    return modules[min(depth, len(modules) - 1)]


def without_copies(tensors: Mapping[str, torch.Tensor], names: Any) -> dict[str, torch.Tensor]:
    """Some writers repeat a tied tensor at every depth; a repetition that differs stays, and is
    refused."""
    last = {name.split(".")[0]: name.split(".")[1] for name in names}
    kept = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        original = ".".join([parts[0], last.get(parts[0], ""), *parts[2:]])
        if name in names or original not in tensors or not torch.equal(tensor, tensors[original]):
            kept[name] = tensor
    return kept
