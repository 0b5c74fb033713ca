"""Is the exported folder the draft that was trained? Read back the way its engine reads it, it says
the same of the same texts."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch

from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import write_weights
from draftsmith.kernels.overlap import overlap
from draftsmith.train.export.source import ExportSource
from tests.engine_readers.table import READERS
from tests.engine_readers.understood import Understood
from tests.unrolled import unrolled_logits

LENGTH, DRAFTED = 20, 3
# Share of its mass that a distribution may move. The same weights in the same order give 0, tensors
# stored again round in the last digits, a transposed or exchanged tensor moves a good part.
LIMIT = 1e-3


def prove(source: ExportSource, folder: Path, engine: str) -> float:
    """The largest share of its mass that a distribution of the export lies elsewhere than the
    checkpoint's; raises for one that its engine would not load, or load as another draft."""
    read = READERS[source.family, engine](folder, source.target_config)
    target = load_target(str(source.target))
    expected = said(ready(source, source.draft, target), target)
    found = said(as_read(source, read, target), target)
    moved = float(1 - overlap(expected, found).min())
    assert moved < LIMIT, f"{engine} reads another draft than the trained one"
    return moved


@functools.lru_cache(maxsize=1)
def load_target(folder: str) -> Target:
    return Target.load(folder, dtype=torch.float32)


def said(drafter: TrainedDrafter, target: Target) -> torch.Tensor:
    """Logits [8, K, V] of drafts behind texts."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(3, 272, (8, LENGTH + DRAFTED), generator=generator).tolist()
    return torch.stack(
        [unrolled_logits(drafter, target, text[:LENGTH], text[LENGTH:]) for text in texts]
    )


def as_read(source: ExportSource, read: Understood | Path, target: Target) -> TrainedDrafter:
    if isinstance(read, Path):
        return ready(source, read, target)
    with tempfile.TemporaryDirectory() as scratch:
        write_weights(Path(scratch), read.config, read.tensors)
        return ready(source, Path(scratch), target)


def ready(source: ExportSource, folder: Path, target: Target) -> TrainedDrafter:
    return FAMILIES[source.family].load(folder, target).to(dtype=target.dtype).eval()
