"""Captured graphs by shape, and what becomes of shapes that cannot be captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

from draftsmith.errors import first_line
from draftsmith.kernels.cuda_graphs import Capturer, Graph

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

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

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
