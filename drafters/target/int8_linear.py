"""A target's linear layers with weights of 8 bits, made of plain ones when it is loaded on a CPU.

The layers of the new model are the target's: its distribution is what they give, for every
number of rows. Input embeddings, norms and experts that are stored as one tensor stay as they are.
"""

from __future__ import annotations

import hashlib
import logging

import torch
from torch import nn

from draftsmith.errors import UserError
from draftsmith.kernels.products.int8_rows import STEP, Int8Rows, Int8Weight, available, quantised

log = logging.getLogger(__name__)

_library = torch.library.Library("draftsmith", "FRAGMENT")
_library.define("int8_linear(Tensor rows, Tensor codes, Tensor scales, Tensor? bias) -> Tensor")
int8_linear = torch.ops.draftsmith.int8_linear.default


def _shape(
    rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], scales.shape[0])


def _multiply(
    rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return Int8Rows([Int8Weight(codes, scales)], [bias], rows.dtype)(rows)[0]


_library.impl("int8_linear", _shape, "Meta")
_library.impl("int8_linear", _multiply, "CPU")


class Int8Linear(nn.Module):
    """`plain` [out, in] with codes for its weights, which states of its dtype are multiplied by."""

    def __init__(self, plain: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.dtype = plain.weight.dtype
        weight = quantised(plain.weight, self.dtype)
        self.codes = nn.Parameter(weight.codes, requires_grad=False)
        self.scales = nn.Parameter(weight.scales, requires_grad=False)
        self.bias = plain.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]. Raises `ValueError` for states of another dtype, for which the
        codes lie in another order."""
        if rows.dtype != self.dtype:
            raise ValueError(f"states are {rows.dtype}, the layer's codes are for {self.dtype}")
        return int8_linear(rows, self.codes, self.scales, self.bias)


def states_dtype() -> torch.dtype:
    """Type of states that this machine multiplies by codes at least cost."""
    fast = torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def check_int8(name: str, device: torch.device | str, shards: int) -> None:
    """Raises `UserError` where a target's weights cannot be made int8."""
    reason = ""
    if torch.device(device).type != "cpu":
        reason = f"its products run on a CPU and the device is {str(device)!r}"
    elif shards > 1:
        reason = f"its layers are not sharded and tensor_parallel is {shards}"
    if reason:
        raise UserError(
            f"dtype is int8 for {name!r}, but {reason}; use a checkpoint that torchao, "
            "bitsandbytes or compressed-tensors has quantised, or another dtype"
        )
    if not available():
        raise UserError(
            "dtype is int8, whose products are compiled at the first start, but there is no C++ "
            "compiler here; install one (g++ or clang++), or use another dtype"
        )


@torch.no_grad()
def make_int8(model: nn.Module, name: str) -> None:
    """Replaces linear layers in place, the head among them. Raises `UserError` where no layer of
    the model is one."""
    before = _bytes(model)
    made: dict[nn.Module, Int8Linear] = {}
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if type(child) is nn.Linear and child.in_features % STEP == 0:
                if child not in made:  # a layer that stands in several places stays one
                    made[child] = Int8Linear(child)
                    child.weight = None  # its memory is for the next one's codes
                setattr(parent, key, made[child])
    if not made:
        raise UserError(
            f"dtype is int8 for {name!r}, which has no plain linear layers; use another dtype"
        )
    log.info(
        "%s: %d linear layers in int8, weights of %.2f GB where %.2f GB were",
        name,
        len(made),
        _bytes(model) / 1e9,
        before / 1e9,
    )


def _bytes(model: nn.Module) -> int:
    return sum(own.numel() * own.element_size() for own in model.parameters())


def int8_revision(revision: str) -> str:
    """Revision of the target that `make_int8` makes of one with this revision."""
    return hashlib.sha256(f"{revision} int8".encode()).hexdigest()[:16]
