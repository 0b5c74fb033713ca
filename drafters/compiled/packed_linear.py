"""Linear layers that read the same input, as one multiplication with weights laid out for a CPU.

A few rows are `kernels.few_rows`, whose products of a row have the same bits beside any others.
More, and all where there is no C++ compiler, are the fastest's: oneDNN's, with weights that it has
laid out beforehand, torch's, or the kernel's too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from draftsmith.kernels.dispatch import reads_freely
from draftsmith.kernels.host_compiler import HEADERS
from draftsmith.kernels.measured import CHOICES, Choices, Way
from draftsmith.kernels.products.few_rows import MOST_ROWS, SOURCE, few_rows
from draftsmith.kernels.products.narrow_products import LEAST_WIDENED, NARROW, widened, widens
from draftsmith.kernels.products.readings import LEAST_BYTES

_linear = torch.ops.mkldnn._linear_pointwise.default
_plain = torch._C._nn.linear
# The number of rows oneDNN lays weights out for. What is good for 8 was as good for 2 and for 64.
_TYPICAL_ROWS = 8
PACKED, PLAIN, KERNEL, WIDENED = "oneDNN, laid out", "torch", "few_rows", "torch, in float32"
# Rows for which the ways are timed, and multiplications of each call.
_TIMED_ROWS, _TIMED_SIZE = 256, 1 << 25

# oneDNN keeps kernels for every number of rows it has met, so memory would grow with every length
# of prompt (tests/e2e/test_load.py watches it). Decoding's few rows stay as they are, more are
# padded.
_EXACT_ROWS, _STEP, _WIDE_ROWS, _WIDE_STEP = 16, 8, 64, 64


def padded_rows(count: int) -> int:
    """The number of rows that `count` rows are multiplied as."""
    if count <= _EXACT_ROWS:
        return count
    step = _STEP if count <= _WIDE_ROWS else _WIDE_STEP
    return -(-count // step) * step


class PackedLinear:
    """`weights` are `[out_i, in]` of one dtype, `biases` their `[out_i]` or None. The tensors stay
    the caller's and may be written in place; `refresh` then lays them out again. At most `copies`
    are made of them: for few rows, then oneDNN's for more. `pass_bytes`: of all weights that are
    read in a pass."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        *,
        copies: int = 2,
        pass_bytes: int = 0,
        choices: Choices = CHOICES,
    ):
        self.weights, self.biases = list(weights), list(biases)
        self._copies, self._pass_bytes, self._choices = copies, pass_bytes, choices
        self.sizes = [len(weight) for weight in weights]
        self._versions: list[int] = []
        self.refresh()

    def refresh(self) -> bool:
        """Lay weights out again; False where none was written."""
        versions = [
            tensor._version for tensor in (*self.weights, *self.biases) if tensor is not None
        ]
        if versions == self._versions:
            return False
        joined = torch.cat(self.weights).detach()
        self._bias = self._joined_bias()
        self.few = few_rows(joined, self._bias, pass_bytes=self._pass_bytes, choices=self._choices)
        self.way = self._fastest(joined)
        # Without a kernel one way is that of few rows too.
        self._widens = self.way == WIDENED or (
            self.few is None and widens(self.dtype, self._choices)
        )
        self._packed = _laid_out(joined) if self.way == PACKED else None
        self._versions = versions
        return True

    def _fastest(self, joined: torch.Tensor) -> str:
        """The way of more rows than few."""
        few, names = self.few, [PACKED, PLAIN, KERNEL, WIDENED]
        if few is None:
            names = [PACKED, PLAIN]
        elif self._copies < 2:
            names.remove(PACKED)
        if self._pass_bytes < LEAST_BYTES:
            return WIDENED if few and widens(self.dtype, self._choices) else names[0]
        width, count = joined.shape[1], _TIMED_ROWS if few else _TYPICAL_ROWS
        num_outputs = min(len(joined), max(_TIMED_SIZE // (count * width), 1))

        def prepare() -> Mapping[str, Way]:
            rows, weight = joined.new_ones(count, width), joined[:num_outputs]
            ways: dict[str, Way] = {PLAIN: lambda: _plain(rows, weight, None)}
            if PACKED in names and (packed := _laid_out(weight)) is not None:
                ways[PACKED] = lambda: _linear(rows, packed, None, "none", [], "")
            if few is not None:
                ways[KERNEL] = lambda: few.first(rows, num_outputs)
            if WIDENED in names and joined.dtype in NARROW:
                ways[WIDENED] = lambda: widened(rows, weight)
            return ways

        shape = [joined.dtype, f"{width} wide", f"{num_outputs} outputs", f"{count} rows"]
        shape += [] if PACKED in names else ["one copy"]
        sources = [SOURCE, *HEADERS]
        return self._choices.fastest("many rows", shape, names, prepare, sources=sources)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    def _joined_bias(self) -> torch.Tensor | None:
        if all(bias is None for bias in self.biases):
            return None
        pairs = zip(self.weights, self.biases)
        return torch.cat(
            [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in pairs]
        ).detach()

    def __call__(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """[..., in] -> [..., out_i] of every weight."""
        is_many = rows.numel() > MOST_ROWS * rows.shape[-1] and self.way != KERNEL
        if is_many or self.few is None:
            return self._many(rows)
        joined = self.few(rows)
        return (joined,) if len(self.sizes) == 1 else self._split(joined)

    def _many(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        count = rows.numel() // rows.shape[-1]
        if self._packed is None:
            multiply = widened if self._widens and count >= LEAST_WIDENED else _plain
            return [multiply(rows, *pair) for pair in zip(self.weights, self.biases)]
        if (missing := padded_rows(count) - count) == 0:
            return self._split(self._multiply(rows))
        flat = torch.nn.functional.pad(rows.reshape(count, -1), (0, 0, 0, missing))
        return self._split(self._multiply(flat)[:count].view(*rows.shape[:-1], -1))

    def _split(self, joined: torch.Tensor) -> Sequence[torch.Tensor]:
        # Not the tensor's own `split`, half of whose time is Python.
        return torch.split_with_sizes(joined, self.sizes, -1)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return _linear(rows, self._packed, self._bias, "none", [], "")


def _laid_out(weight: torch.Tensor) -> torch.Tensor | None:
    """None on a processor for which oneDNN does not take the dtype, as bfloat16 without AVX-512."""
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    except RuntimeError:
        return None


def packable(weight: torch.Tensor) -> bool:
    """True for weights that oneDNN takes: 2-D, on a CPU, of a dtype it multiplies."""
    return (
        torch.backends.mkldnn.is_available()
        and reads_freely(weight.device)
        and weight.ndim == 2
        and weight.dtype in (torch.float32, torch.bfloat16)
    )
