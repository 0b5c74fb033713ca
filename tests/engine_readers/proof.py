"""Is the exported folder the draft that was trained? It is read back the way its engine reads it
and drafts the same rounds."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter, TrainedDrafter
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.speculate import speculate
from draftsmith.drafters.target.device import device_of, load_target
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import write_weights
from draftsmith.errors import UserError
from draftsmith.kernels.acceptance import AcceptanceCounts, overlap
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.command import open_source, run
from draftsmith.train.export.source import ExportSource
from tests.engine_readers.table import READERS
from tests.engine_readers.understood import Understood

TEXTS = (
    "The draft proposes a few tokens and the target keeps those that",
    "def main() -> int:\n    parser = argparse.ArgumentParser(",
    "import os\nimport sys\n\n\nclass Reader:",
)
MAX_NEW_TOKENS = 16
TEMPERATURES = (0.0, 1.0)
# Share of its mass that a distribution may move. The same weights in the same order give 0; a
# stitched target's bias adds of zero and tensors stored again round in the last digits, a
# transposed or exchanged tensor moves a good part of all mass.
FLOAT32_LIMIT, HALF_LIMIT = 1e-3, 2e-2


class Play(NamedTuple):
    """Rounds of a draft over all texts at one temperature."""

    proposals: list[Proposal]
    counts: AcceptanceCounts


class Proof(NamedTuple):
    rounds: int
    accepted: int
    # the largest share of its mass that a distribution of the exported draft lies elsewhere than
    # the trained one's
    moved: float


def open_target(folder: str | Path, source: ExportSource) -> Target:
    """Loads on a CPU in float32, whose `FLOAT32_LIMIT` keeps drafts apart best."""
    dtype = "float32" if device_of().type == "cpu" else "auto"
    return load_target(str(folder), dtype=dtype, trust_remote_code=source.trust_remote_code)


def export_and_prove(config: ExportConfig) -> Proof:
    run(config)
    return prove(open_source(config), Path(config.out), config.to)


def prove(source: ExportSource, folder: Path, engine: str) -> Proof:
    """Raises a `UserError` for an export that its engine would not load, or load as another draft
    than the checkpoint's."""
    target = open_target(source.target, source)
    expected = play_checkpoint(source, target)
    prompts = prompts_for(target)
    read = READERS[source.family, engine](folder, source.target_config)
    if isinstance(read, Understood) and read.target is not None:
        target = open_target(read.target, source)
    found = play_all(
        as_read(source, read, target), target, prompts, k=source.num_speculative_tokens
    )
    limit = FLOAT32_LIMIT if target.dtype == torch.float32 else HALF_LIMIT
    moved = max(
        compare(ours, theirs, engine, limit) for ours, theirs in zip(expected, found, strict=True)
    )
    counts = [one.counts for one in found]
    return Proof(
        sum(count.rounds for count in counts), sum(sum(count.accepted) for count in counts), moved
    )


def play_checkpoint(source: ExportSource, target: Target) -> list[Play]:
    """Rounds of the draft that was trained. It is let go, lest two pairs be held."""
    trained = ready(source, source.draft, target)
    return play_all(trained, target, prompts_for(target), k=source.num_speculative_tokens)


def play_all(
    drafter: ServingDrafter, target: Target, prompts: Sequence[Sequence[int]], *, k: int
) -> list[Play]:
    return [
        play(drafter, target, prompts, k=k, temperature=temperature) for temperature in TEMPERATURES
    ]


def as_read(
    source: ExportSource, read: Understood | Path | ServingDrafter, target: Target
) -> ServingDrafter:
    if isinstance(read, Path):
        return ready(source, read, target)
    if not isinstance(read, Understood):
        return read
    with tempfile.TemporaryDirectory() as scratch:
        write_weights(Path(scratch), read.config, read.tensors)
        return ready(source, Path(scratch), target)


def ready(source: ExportSource, folder: Path, target: Target) -> TrainedDrafter:
    return (
        FAMILIES[source.family]
        .load(folder, target)
        .to(device=target.device, dtype=target.dtype)
        .eval()
    )


def prompts_for(target: Target) -> list[list[int]]:
    tokenizer = target.tokenizer()
    longest = max(2, target.max_positions - MAX_NEW_TOKENS)
    return [tokenizer.encode(text, add_special_tokens=False)[:longest] for text in TEXTS]


class Witness:
    """A draft as `speculate` takes it, with its proposals kept."""

    def __init__(self, drafter: ServingDrafter):
        self.drafter, self.family, self.taps = drafter, drafter.family, drafter.taps
        self.proposals: list[Proposal] = []

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool | None:
        return self.drafter.new_pool(num_blocks, block_size, device, dtype)

    def propose(self, inputs: DraftInputs) -> Proposal:
        self.proposals.append(self.drafter.propose(inputs))
        return self.proposals[-1]

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        return self.drafter.cached_after(last, drafted, accepted)


def play(
    drafter: ServingDrafter,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    temperature: float,
) -> Play:
    witness = Witness(drafter)
    rounds = speculate(
        witness,
        target,
        prompts,
        k=k,
        temperature=temperature,
        seeds=range(len(prompts)),
        max_new_tokens=MAX_NEW_TOKENS,
    )
    return Play(witness.proposals, rounds.counts())


def compare(ours: Play, theirs: Play, engine: str, limit: float) -> float:
    """The largest share of mass that a distribution moved; every draw of a round is a function of
    its distribution and of the request's seed."""
    moved = 0.0
    for number, (own, read) in enumerate(zip(ours.proposals, theirs.proposals)):
        p, q = own.logits, read.logits
        if p is not None and q is not None and p.shape == q.shape:
            moved = max(moved, mass_moved(own, p, q))
        if moved > limit or not torch.equal(own.tokens, read.tokens):
            raise UserError(
                f"the exported draft is not the trained one: in round {number + 1} its "
                f"distributions lie up to {moved:.2g} of their mass "
                f"elsewhere when {engine}'s loader has read it; this is a defect of the layout, "
                "report it"
            )
    if ours.counts.to_dict() != theirs.counts.to_dict():
        raise UserError(
            f"of the exported draft {sum(theirs.counts.accepted)} tokens are accepted where "
            f"{sum(ours.counts.accepted)} of the "
            f"trained one are, as {engine}'s loader reads it; this is a defect of the layout, "
            "report it"
        )
    return moved


def mass_moved(own: Proposal, p: torch.Tensor, q: torch.Tensor) -> float:
    """Largest share that lies elsewhere in `q` [B, K, V] than in `p`, at the drafted tokens of
    `own`."""
    drafted = torch.arange(own.tokens.shape[1], device=own.tokens.device) < own.lengths[:, None]
    if not drafted.any():
        return 0.0
    return float(1 - overlap(p[drafted], q[drafted]).min())
