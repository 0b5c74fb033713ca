"""Costs of a round on this machine: passes of the target and rounds of a draft of the planned
shape, really run.

All that is compared takes turns, so that a loaded machine slows it alike. B rows, each `context`
tokens into its text.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from draftsmith.drafters.interface import DraftInputs, TrainedDrafter
from draftsmith.drafters.recurrent.kept import NUM_SIDES, KeptState
from draftsmith.drafters.recurrent.pieces import Split, StatePass, round_waves
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.train.plan.forecast import Spread, between

BLOCK_SIZE, TURNS = 16, 9
TURN_S = 0.02  # a turn runs each thing for about so long, and once at least
NEW_TOKENS = 2  # committed in the round before, as in a round that went fairly well


class RoundTimes(NamedTuple):
    """Times of one number of rows. Milliseconds are the least of all turns."""

    pass_ms: float  # the target over one token per row, and the draw
    verify_ms: dict[int, float]  # by k: the target over k + 1 tokens per row, and verification
    draft_ms: dict[int, float]  # by k
    cost: dict[int, Spread]  # by k: of the whole round, in rounds without drafts


def measured_lengths(k: int) -> list[int]:
    """Draft lengths that are run; those between lie nearly on a line."""
    return sorted({1, 2, 4, k} & set(range(1, k + 1)) | {k})


def time_rounds(
    target: Target, drafter: TrainedDrafter, *, rows: int, k: int, context: int
) -> RoundTimes:
    table = Tables(target, drafter, rows, context, k)
    with torch.inference_mode():
        # Some families draft only so far.
        k = min(k, int(table.draft(k)().lengths.max()))
    lengths = measured_lengths(k)
    runs: dict[Any, Callable[[], Any]] = {"plain": table.decode(0)}
    runs |= {("verify", length): table.decode(length) for length in lengths}
    runs |= {("draft", length): table.draft(length) for length in lengths}
    samples = take_turns(runs, target.device)
    verify, draft = (
        {length: samples[part, length] for length in lengths} for part in ("verify", "draft")
    )
    return RoundTimes(
        pass_ms=1e3 * min(samples["plain"]),
        verify_ms={length: 1e3 * min(values) for length, values in verify.items()},
        draft_ms={length: 1e3 * min(values) for length, values in draft.items()},
        cost={
            length: round_cost(samples["plain"], verify, draft, length)
            for length in range(1, k + 1)
        },
    )


def round_cost(
    plain: list[float], verify: dict[int, list[float]], draft: dict[int, list[float]], k: int
) -> Spread:
    """Cost of a round with drafts, in plain rounds. The least times are what the machine can do;
    the faster half, rank by rank, bounds their error."""
    ranked = [
        {at: sorted(values) for at, values in verify.items()},
        {at: sorted(values) for at, values in draft.items()},
    ]
    ratios = [
        sum(between({at: values[rank] for at, values in part.items()}, k) for part in ranked)
        / sorted(plain)[rank]
        for rank in range((len(plain) + 1) // 2)
    ]
    return Spread(ratios[0], min(ratios), max(ratios))


@torch.inference_mode()
def take_turns(
    runs: dict[Any, Callable[[], Any]], device: torch.device, turns: int | None = None
) -> dict[Any, list[float]]:
    """Seconds of each run, one per turn: the fastest of its repetitions, which others disturb
    least."""
    samples: dict[Any, list[float]] = {name: [] for name in runs}
    repeats = {}
    for name, run in runs.items():
        timed(run, device)
        once_s = agreed(timed(run, device))
        repeats[name] = max(1, min(50, int(TURN_S / max(once_s, 1e-6))))
    for _ in range(turns or TURNS):
        for name, run in runs.items():
            samples[name].append(min(timed(run, device) for _ in range(repeats[name])))
    return samples


def agreed(seconds: float) -> float:
    """The longest time of all processes: those that share a target must make equally many runs."""
    if not dist.is_initialized():
        return seconds
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, seconds)
    return max(found)


def timed(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun_s = perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - begun_s


class Tables:
    """Rows of text whose keys and values are cached up to the newest tokens."""

    def __init__(self, target: Target, drafter: TrainedDrafter, rows: int, context: int, k: int):
        self.target, self.drafter, self.rows = target, drafter, rows
        self.context = min(context, target.max_positions - NEW_TOKENS - k - 1)
        width = -(-(self.context + NEW_TOKENS + k + 1) // BLOCK_SIZE)
        self.device = target.device
        self.tables = torch.arange(rows * width, device=self.device).view(rows, width)
        self.pool: PagedPool = target.new_pool(rows * width, BLOCK_SIZE)
        self.states = target.new_states(NUM_SIDES * rows)
        self.draft_pool = drafter.new_pool(rows * width, BLOCK_SIZE, self.device, target.dtype)

    def decode(self, k: int) -> Callable[[], Any]:
        """The target over the newest token and k drafts of every row, and the verdict on them."""
        newest = self.context + NEW_TOKENS - 1
        positions = (newest + torch.arange(k + 1, device=self.device)).repeat(self.rows)
        lengths = torch.full((self.rows,), k + 1, device=self.device)
        ids, wanted = (
            torch.full((1, len(positions)), 7, device=self.device),
            torch.arange(len(positions), device=self.device),
        )
        distribution = SamplingRows.of([1.0] * len(positions), device=self.device)
        drafts = torch.full((self.rows, k), 7, device=self.device)
        seeds = torch.arange(self.rows, device=self.device)

        layers = self.target.state_layers
        reads = [layers.row_read(row, KeptState(), newest, 1, k) for row in range(self.rows)]

        def run() -> Any:
            context: AttentionContext = PagedPass(self.pool, self.tables, positions, lengths)
            if self.states is not None:
                context = StatePass(context, Split(round_waves(reads), self.states, self.device))
            output = self.target.forward(
                ids, positions[None], context, wanted, self.drafter.taps if k else ()
            )
            q_logits = output.logits.view(self.rows, k + 1, -1)[:, :k]
            return verify_chain(
                process(output.logits, distribution),
                drafts,
                lengths - 1,
                q_logits,
                seeds,
                seeds + newest + 1,
            )

        return run

    def draft(self, k: int) -> Callable[[], Any]:
        """A proposal after a round that committed a few tokens."""
        inputs = self.inputs(k)
        return lambda: self.drafter.propose(inputs)

    def inputs(self, k: int, temperature: float = 1.0) -> DraftInputs:
        num_taps = len(self.drafter.taps)
        width = num_taps * self.target.hidden_size
        states = (
            torch.randn(self.rows * NEW_TOKENS, width, device=self.device, dtype=self.target.dtype)
            if num_taps
            else None
        )
        return DraftInputs(
            tokens=torch.full((self.rows * (NEW_TOKENS + 1),), 7, device=self.device),
            starts=torch.full((self.rows,), self.context - 1),
            lengths=torch.full((self.rows,), NEW_TOKENS + 1),
            taps=states,
            num_draft=torch.full((self.rows,), k),
            sampling=SamplingRows.of([temperature] * self.rows, device=self.device),
            seeds=torch.arange(self.rows, device=self.device),
            pool=self.draft_pool,
            block_tables=self.tables,
            histories=[[7] * (self.context + NEW_TOKENS)] * self.rows,
        )


def decode_tokens_per_s(
    target: Target, drafter: TrainedDrafter, *, rows: int, context: int
) -> float:
    """Tokens per second of `rows` answers written at once without drafts, as training text is."""
    samples = take_turns(
        {"plain": Tables(target, drafter, rows, context, 1).decode(0)}, target.device
    )
    return rows / min(samples["plain"])
