"""Folders of MLP speculators as IBM and Snowflake publish them, and the norm of all kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.drafters.draft_shape import check_fits
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError

PREFIX = "speculator."
EPS = 1e-6
RNN, LSTM = "sum_rnn", "sum_lstm"
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
    found["method"] = found.get("method") or RNN
    if found["method"] not in (RNN, LSTM):
        raise UserError(
            f"draft {str(folder)!r} has method={found['method']!r}; draftsmith reads {RNN} and "
            f"{LSTM}, so use a draft of one of these"
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
