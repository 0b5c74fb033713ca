"""State of a chain's rows at fixed addresses, which graphs hand from step to step.

R rows that draft, H hidden width.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from draftsmith.errors import first_line
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.cuda_graphs import Capturer, Graph
from draftsmith.kernels.sampling.filters import Passes, SamplingRows

if TYPE_CHECKING:
    from draftsmith.drafters.autoregressive.state import ChainState


EVERY_TOKEN = 1 << 30  # more than any vocabulary has


class ChainBuffers:
    """State of as many rows as a batch may have, at fixed addresses. A bucket uses the first of
    them."""

    def __init__(
        self, num_rows: int, max_blocks: int, hidden: torch.Tensor, sampling: SamplingRows
    ):
        device = hidden.device
        whole = {"dtype": torch.int64, "device": device}
        self.tokens, self.positions, self.left, self.seeds = torch.zeros(4, num_rows, **whole)
        self.tables = torch.full((num_rows, max_blocks), NULL_BLOCK, **whole)
        self.hidden = torch.zeros(num_rows, hidden.shape[1], dtype=hidden.dtype, device=device)
        self.sampling = sampling.room(num_rows)

    def fill(
        self, state: ChainState, left: torch.Tensor, seeds: torch.Tensor, sampling: SamplingRows
    ) -> None:
        """`left` [R]: how many tokens each row may still draft; further rows draft none."""
        self.left.zero_()
        self.tables[: len(left), state.tables.shape[1] :] = NULL_BLOCK
        self.write(state, left, seeds, sampling)

    def write(
        self, state: ChainState, left: torch.Tensor, seeds: torch.Tensor, sampling: SamplingRows
    ) -> None:
        """The first R rows."""
        count, width = state.tables.shape
        pairs = [
            (self.tables[:, :width], state.tables),
            (self.tokens, state.tokens),
            (self.hidden, state.hidden),
            (self.positions, state.positions),
            (self.left, left),
            (self.seeds, seeds),
        ]
        for buffer, values in pairs:
            buffer[:count].copy_(values)
        self.sampling.take(sampling)


def bucket(sizes: Sequence[int], size: int) -> int:
    """The smallest of the ascending `sizes` that `size` fits into."""
    return sizes[bisect.bisect_left(sizes, size)]


def for_graphs(passes: Passes) -> Passes:
    """Three kinds, each of which can serve what needs less: Triton's draws filter by all or by
    nothing."""
    if passes.all_greedy:
        return passes
    filters = passes.filtered
    return Passes(True, False, True, EVERY_TOKEN if filters else 0, filters, filters)


Shape = TypeVar("Shape", bound=Hashable)
Output = TypeVar("Output")
log = logging.getLogger(__name__)


class GraphShapes(Generic[Shape, Output]):
    """Graphs of the work `what`, each captured when its shape first occurs.

    A shape whose capture finds no memory is left out and runs without a graph. Any other failure is
    of the model, which looks at values on the host: nothing is captured after it, with one warning.
    """

    def __init__(self, capturer: Capturer, what: str):
        self.capturer, self.what = capturer, what
        self.broken = False
        self._graphs: dict[Shape, tuple[Graph, Output]] = {}
        self._left_out: set[Shape] = set()

    def __contains__(self, shape: Shape) -> bool:
        """True where `shape` has a graph."""
        return shape in self._graphs

    def find(
        self, shape: Shape, run: Callable[[], Output], idle: torch.Tensor | None = None
    ) -> tuple[Graph, Output] | None:
        """The graph of `run` for `shape` and the tensors that its replays write; None: it must run
        without one. Capturing runs it: `idle` is set to zero before."""
        if self.broken:
            return None
        if shape not in self._graphs and shape not in self._left_out:
            if idle is not None:
                idle.zero_()
            self._capture(shape, run)
        return self._graphs.get(shape)

    def _capture(self, shape: Shape, run: Callable[[], Output]) -> None:
        try:
            self._graphs[shape] = self.capturer.capture(run)
        except torch.OutOfMemoryError:
            log.warning("no memory for a CUDA graph of %s of shape %s", self.what, shape)
            self._left_out.add(shape)
        except RuntimeError as error:
            reason = first_line(error)
            log.warning("%s cannot be captured as CUDA graphs (%s)", self.what, reason)
            self.broken = True
