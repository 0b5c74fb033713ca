"""CUDA graphs: work captured once and launched again with one call, and the shapes of passes that
are worth a graph of their own."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from draftsmith.errors import first_line

if TYPE_CHECKING:
    from draftsmith.kernels.attention.pool import PagedPool

log = logging.getLogger(__name__)
Key = TypeVar("Key", bound=Hashable)
Output = TypeVar("Output")

_WARM_UPS = 2  # runs before a capture: kernels are compiled and libraries take their workspace


class Graph(Protocol):
    def replay(self) -> None: ...


class Capturer(Protocol):
    def capture(self, run: Callable[[], Output]) -> tuple[Graph, Output]:
        """A graph of `run`, and the tensors its replays write. It is run, too: what it reads must
        allow that."""
        ...


class GraphRoom(NamedTuple):
    """Pool and sizes that a drafter's graphs are made for."""

    pool: PagedPool | None  # where it keeps keys and values
    max_batch: int
    max_blocks: int  # of a row
    capturer: Capturer


class CudaCapturer:
    """All graphs share one memory pool: they never run at the same time, and their outputs are used
    up before the next runs. The first of them is kept: torch captures nothing more into a pool that
    has lost all its graphs.

    Args:
        device: of the tensors; None: the current one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        if device is None or device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        with torch.cuda.device(self._device):
            # One stream for warm-up and capture: libraries keep a workspace for each.
            self._stream = torch.cuda.Stream(self._device)
            self._memory = torch.cuda.graph_pool_handle()
        self._kept: Graph | None = None

    def capture(self, run: Callable[[], Output]) -> tuple[Graph, Output]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            callers = torch.cuda.current_stream()
            self._stream.wait_stream(callers)
            # Not `torch.cuda.graph`: where a capture has failed that leaves this thread on the
            # stream of the capture, and its memory pool taken for one that is being filled.
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
                # What the runs took must be free for the graph, which cannot ask for it.
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                output = self._captured(graph, run)
            callers.wait_stream(self._stream)
        return graph, output

    def _captured(self, graph: Any, run: Callable[[], Output]) -> Output:
        # A version may be loading on another thread, which is none of the capture's business.
        try:
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            output = self._run(graph, run)
        except BaseException:
            if self._kept is None:  # the pool has had no graph but this one
                self._memory = torch.cuda.graph_pool_handle()
            raise
        self._kept = self._kept or graph
        return output

    def _run(self, graph: Any, run: Callable[[], Output]) -> Output:
        try:
            output = run()
        except BaseException:
            # The error that counts is the one of `run`.
            with suppress(RuntimeError):
                self._end(graph)
            raise
        self._end(graph)
        return output

    def _end(self, graph: Any) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # A capture in which something forbidden was called throws here before it gives back the
            # pool; the next capture, and any `empty_cache`, would meet it there.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._memory)
                torch._C._cuda_releasePool(self._device.index, self._memory)
            raise


class CountedCapturer:
    """Counts what another capturer captures, for metrics.

    A lack of memory is no failure: the shape is left out, and smaller ones may fit.
    """

    def __init__(self, capturer: Capturer):
        self._capturer = capturer
        self.num_graphs = 0
        self.broken = False  # some work cannot be captured

    def capture(self, run: Callable[[], Output]) -> tuple[Graph, Output]:
        try:
            captured = self._capturer.capture(run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self.broken = True
            raise
        self.num_graphs += 1
        return captured


class GraphShapes(Generic[Key, Output]):
    """Graphs of the work `what`, each captured when its shape first occurs.

    A shape whose capture finds no memory is left out and runs without a graph. Any other failure is
    of the model, which looks at values on the host: nothing is captured after it, with one warning.
    """

    def __init__(self, capturer: Capturer, what: str):
        self.capturer, self.what = capturer, what
        self.broken = False
        self._graphs: dict[Key, tuple[Graph, Output]] = {}
        self._left_out: set[Key] = set()

    def __contains__(self, shape: Key) -> bool:
        """True where `shape` has a graph."""
        return shape in self._graphs

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def find(
        self, shape: Key, run: Callable[[], Output], before: Callable[[], object] | None = None
    ) -> tuple[Graph, Output] | None:
        """The graph of `run` for `shape` and the tensors that its replays write; None: it must run
        without one. Capturing runs it, after `before`."""
        if shape not in self._graphs and not self.broken and shape not in self._left_out:
            self._capture(shape, run, before)
        return self._graphs.get(shape)

    def _capture(
        self, shape: Key, run: Callable[[], Output], before: Callable[[], object] | None
    ) -> None:
        try:
            if before is not None:
                before()
            self._graphs[shape] = self.capturer.capture(run)
        except torch.OutOfMemoryError:
            if not self._left_out:
                log.warning(
                    "no memory for a CUDA graph of %s, %s: such run without; serve with a smaller "
                    "memory_gib or max_batch",
                    self.what,
                    shape,
                )
            self._left_out.add(shape)
        except RuntimeError as error:
            reason = first_line(error)
            log.warning("%s cannot be captured as CUDA graphs (%s)", self.what, reason)
            self.broken = True


def row_buckets(max_batch: int) -> list[int]:
    """Powers of two and the numbers half way, and beyond the batch one row for padding."""
    return [*sizes_up_to(max_batch), max_batch + 1]


def sizes_up_to(most: int) -> list[int]:
    powers = [2**exponent for exponent in range(most.bit_length())]
    return sorted(
        {size for power in powers for size in (power, power + power // 2) if size <= most} | {most}
    )


class Shape(NamedTuple):
    num_rows: int
    num_tokens: int

    def holds(self, num_rows: int, num_tokens: int) -> bool:
        """True where a pass fits, with a row for tokens that are left over."""
        if num_tokens < self.num_tokens:
            return num_rows < self.num_rows
        return num_tokens == self.num_tokens and num_rows <= self.num_rows


class Shapes:
    """At most two for each number of tokens: one for rounds in which all rows draft as many tokens
    as they may, and one for any other. Rows are no more than are needed, since attention cuts
    contexts by their number.

    Args:
        per_row: most tokens of a row: the one that is due, and those drafted.
        most_tokens: of a pass.
    """

    def __init__(self, *, max_batch: int, per_row: int, most_tokens: int):
        self._tokens = token_buckets(most_tokens)
        self._by_tokens = {
            tokens: sorted(
                {
                    Shape(min(rows, max_batch + 1), tokens)
                    for rows in (-(-tokens // per_row), tokens)
                }
            )
            for tokens in self._tokens
        }
        # The fewest rows need the first of the two if any do, the most the last.
        met = {
            self.of(num_rows, num_tokens)
            for num_tokens in range(1, most_tokens + 1)
            for num_rows in (1, min(num_tokens, max_batch))
        }
        self._all = sorted(
            (shape for shape in met if shape is not None),
            key=lambda shape: (shape.num_tokens, shape.num_rows),
            reverse=True,
        )
        self.most_rows = max(shape.num_rows for shape in self._all)
        self.most_tokens = self._all[0].num_tokens

    def __iter__(self) -> Iterator[Shape]:
        """Largest first, so that each graph finds the memory of the one before."""
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def of(self, num_rows: int, num_tokens: int) -> Shape | None:
        """The smallest that holds a pass; None: it is too large for any."""
        at = bisect.bisect_left(self._tokens, num_tokens)
        if at == len(self._tokens):
            return None
        fitting = (
            shape
            for shape in self._by_tokens[self._tokens[at]]
            if shape.holds(num_rows, num_tokens)
        )
        return next(fitting, None)


def token_buckets(most: int) -> list[int]:
    """Every number up to 8, where a token more is a share that counts, then powers of two and the
    numbers half way."""
    return sorted({*range(1, min(most, 8) + 1), *sizes_up_to(most)})
