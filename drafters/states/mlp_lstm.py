"""The LSTM kind of the MLP speculator (Snowflake's Arctic, `method: sum_lstm`): gates between the
states of the depths, from projection and embedding added up.

    f, i, o, c = proj_s(state_{s-1}) + mix * emb(x_{t+1+s}) repeated four times,   state_{-1} = h_t
    cell_s  = cell_{s-1} * sigmoid(f) + gelu(cell_ln(c)) * sigmoid(i),             cell_{-1} = 0
    state_s = gelu(state_ln(cell_s)) * sigmoid(o)
    logits of x_{t+2+s} = head(state_s)

All depths share everything but the first projection. State and cell are handed on side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.drafters.autoregressive.state import HeadStep
from draftsmith.drafters.states.mlp_layout import (
    LSTM,
    PREFIX,
    ScaledNorm,
    normed,
    own_names,
)
from draftsmith.drafters.states.state_head import StateHead
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import (
    ReadBytes,
    load_into,
    read_weights,
    weight_bytes,
    write_weights,
)
from draftsmith.errors import UserError


class MlpLstm(StateHead):
    family = "mlp"
    has_own_heads = False

    def __init__(self, target: Target, *, inner_size: int, num_predict: int, scale_input: bool):
        super().__init__()
        self.state_size, self.inner_size = target.hidden_size, inner_size
        self.vocab_size, self.max_depth = target.vocab_size, num_predict
        self.scale_input = scale_input
        self.forget_emb = nn.ModuleList([nn.Embedding(target.vocab_size, inner_size)])
        self.projs = nn.ModuleList(
            nn.Linear(size, 4 * inner_size, bias=False) for size in (self.state_size, inner_size)
        )
        self.cell_ln = nn.ModuleList([ScaledNorm(inner_size)])
        self.state_ln = nn.ModuleList([ScaledNorm(inner_size)])
        self.head = nn.ModuleList([nn.Linear(inner_size, target.vocab_size, bias=False)])
        state_weight = 0.5 ** (0.5 / num_predict)
        self.mix = math.sqrt((1 - state_weight**2) * (inner_size / 2)) / state_weight
        self.to(target.device)

    def begin(self, taps: torch.Tensor) -> torch.Tensor:
        taps = taps.to(self.head[0].weight.dtype)
        state = normed(taps) / math.sqrt(2) if self.scale_input else taps
        return torch.cat([state, state.new_zeros(*state.shape[:-1], self.inner_size)], dim=-1)

    def advance(self, state: torch.Tensor, tokens: torch.Tensor, depth: int) -> HeadStep:
        size = self.inner_size
        before, cell = state[..., :-size], state[..., -size:]
        token = self.forget_emb[0](tokens).repeat(*[1] * tokens.ndim, 4)
        mixed = self.projs[min(depth, 1)](before) + self.mix * token
        forget, take, give, candidate = mixed.split(size, dim=-1)
        taken = nn.functional.gelu(self.cell_ln[0](candidate)) * torch.sigmoid(take)
        cell = cell * torch.sigmoid(forget) + taken
        out = nn.functional.gelu(self.state_ln[0](cell)) * torch.sigmoid(give)
        return HeadStep(next_hidden=torch.cat([out, cell], dim=-1), head_input=out)

    def head_at(self, depth: int) -> torch.Tensor:
        return self.head[0].weight

    def head_weight(self) -> torch.Tensor:
        return self.head[0].weight

    def read_bytes(self) -> ReadBytes:
        """The second projection's; the first is another by its width alone."""
        parts = [self.projs[-1], self.cell_ln, self.state_ln, self.head]
        return ReadBytes(proposal=0, token=weight_bytes(parts))

    def save(self, folder: Path) -> None:
        tensors = {PREFIX + name: tensor for name, tensor in self.state_dict().items()}
        write_weights(Path(folder), self.portable_config(), tensors)

    def portable_config(self) -> dict[str, Any]:
        return {
            "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "method": LSTM,
            "vocab_size": self.vocab_size,
            "input_hidden_dim": self.state_size,
            **{f"{kind}_dim": str(self.inner_size) for kind in ("emb", "inner", "proj")},
            "n_predict": self.max_depth,
            "top_k_tokens_per_head": [1] * self.max_depth,
            "tie_weights": True,
            "tie_lstm_embs": True,
            "scale_input": self.scale_input,
            "dtype": str(self.head[0].weight.dtype).removeprefix("torch."),
        }

    @classmethod
    def read(cls, folder: Path, values: Mapping[str, Any], target: Target) -> MlpLstm:
        """`values` as `sizes_in` gives them."""
        for key in ("tie_weights", "tie_lstm_embs"):
            if not values.get(key):
                raise UserError(
                    f"draft {str(folder)!r} is an LSTM speculator with {key}="
                    f"{values.get(key)!r}, which nothing serves; use one with tied weights"
                )
        drafter = cls(
            target,
            inner_size=values["inner_dim"],
            num_predict=values["n_predict"],
            scale_input=bool(values.get("scale_input")),
        )
        tensors = {
            name: tensor
            for name, tensor in own_names(read_weights(folder)).items()
            if not is_copy(name)
        }
        drafter.to(next(iter(tensors.values())).dtype)
        load_into(drafter, tensors, str(folder))
        return drafter


def is_copy(name: str) -> bool:
    """True for the head of a later depth, which tied weights repeat, and the copies that an engine
    keeps of it in FP8."""
    module, depth, *_ = name.split(".")
    return module == "qhead" or (module == "head" and depth != "0")
