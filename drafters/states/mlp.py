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
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.drafters.autoregressive.state import HeadStep
from draftsmith.drafters.draft_shape import check_fits
from draftsmith.drafters.layouts.folder import DraftFolder
from draftsmith.drafters.options import MlpOptions
from draftsmith.drafters.states.state_head import StateHead
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import ReadBytes, read_config, read_weights, weight_bytes
from draftsmith.errors import UserError
from draftsmith.kernels.products.fast_types import name_of


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
        self.state_size = size = target.hidden_size
        self.inner_size, self.tied, self.scale_input = inner_size, tied, scale_input
        self.vocab_size, self.max_depth = target.vocab_size, num_predict
        state_weight = 0.5 ** (0.5 / num_predict)
        self.mix = math.sqrt((1 - state_weight**2) * (inner_size / 2)) / state_weight
        copies = 1 if tied else num_predict
        self.emb = nn.ModuleList(nn.Embedding(target.vocab_size, inner_size) for _ in range(copies))
        sizes = [size, *[inner_size] * (min(2, num_predict) - 1 if tied else num_predict - 1)]
        self.proj = nn.ModuleList(nn.Linear(width, inner_size, bias=False) for width in sizes)
        self.ln = nn.ModuleList(ScaledNorm(inner_size) for _ in range(copies))
        self.head = nn.ModuleList(
            nn.Linear(inner_size, target.vocab_size, bias=False) for _ in range(copies)
        )
        self.to(target.device)

    @classmethod
    def matches(cls, draft: DraftFolder, target: Target | None = None) -> bool:
        return draft.config.get("model_type") == "mlp_speculator"

    @classmethod
    def new(cls, options: MlpOptions, target: Target, token_counts: torch.Tensor | None) -> Mlp:
        inner_size = options.inner_size or target.hidden_size
        drafter = cls(
            target, inner_size=inner_size, num_predict=options.num_predict, scale_input=True
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

    def portable_tensors(self) -> dict[str, torch.Tensor]:
        return {PREFIX + name: value for name, value in self.state_dict().items()}

    def portable_config(self) -> dict[str, Any]:
        """Config of IBM's checkpoints, which vLLM read while it served them."""
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": self.vocab_size,
            "emb_dim": self.state_size,
            "inner_dim": self.inner_size,
            "n_predict": self.max_depth,
            "n_candidates": self.max_depth,
            "top_k_tokens_per_head": [1] * self.max_depth,
            "tie_weights": self.tied,
            "scale_input": self.scale_input,
            "dtype": name_of(self.head[0].weight.dtype),
        }

    @classmethod
    def load(cls, folder: Path, target: Target) -> Mlp:
        values = sizes_in(read_config(folder), folder)
        check_config(values, target, folder)
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
        return drafter.filled(tensors, folder)


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


PREFIX = "speculator."
EPS = 1e-6
SIZES = ("emb_dim", "inner_dim", "proj_dim")
# Snowflake's modules are sequences, of one entry where a size is one number.
SEQUENCE = re.compile(r"(emb|proj|ln)\.(\d+)\.0\.(\w+)")


class ScaledNorm(nn.Module):
    """An RMS norm with gain and shift."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.weight * normed(states) + self.bias


def normed(states: torch.Tensor) -> torch.Tensor:
    wide = states.float() if states.dtype in (torch.bfloat16, torch.float16) else states
    return (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + EPS)).to(states.dtype)


def own_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    return {SEQUENCE.sub(r"\1.\2.\3", name): tensor for name, tensor in named.items()}


def sizes_in(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config with numbers for sizes, which Snowflake writes as text. There `emb_dim` is the
    width of the embeddings, and `input_hidden_dim` that of the target; IBM's `emb_dim` is the
    latter and `inner_dim` both others."""
    found = dict(values)
    for key in SIZES:
        size = found.get(key)
        if isinstance(size, str):
            if not size.isdigit():
                raise UserError(
                    f"draft {str(folder)!r} has {key}={size!r}, layers within a layer, which "
                    "draftsmith does not serve; use a draft with one size"
                )
            found[key] = int(size)
    if (method := found.get("method") or "sum_rnn") != "sum_rnn":
        raise UserError(
            f"draft {str(folder)!r} has method={method!r}, which draftsmith does not serve; use a "
            "draft with sum_rnn"
        )
    found["inner_dim"] = found.get("inner_dim") or found.get("emb_dim")
    found["emb_dim"] = found.pop("input_hidden_dim", found.get("emb_dim"))
    return found


def check_config(values: Mapping[str, Any], target: Target, folder: Path) -> None:
    sizes = {"vocab_size": target.vocab_size, "emb_dim": target.hidden_size}
    check_fits(values, sizes, target, folder)
    if not isinstance(values.get("n_predict"), int) or values["n_predict"] < 1:
        raise UserError(
            f"draft {str(folder)!r} has n_predict={values.get('n_predict')!r}; restore config.json"
        )
