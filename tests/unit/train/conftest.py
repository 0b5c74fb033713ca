"""A drafter small enough to know everything about (its state depends on the last known token and the
depth only), and a training run of seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from draftsmith.drafters.interface import UnrollBatch, UnrolledStep
from draftsmith.drafters.target.target import Target
from draftsmith.train import session
from draftsmith.train.config import OptimConfig, TrainConfig
from tests.data_folders import rows_of, write_rows

FAST = OptimConfig(lr=1e-2)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second a run; drawing has tests of its own."""
    monkeypatch.setattr(
        session, "draw_curves", lambda metrics, picture: picture.write_bytes(b"\x89PNG")
    )


class TableDrafter(torch.nn.Module):
    """At depth s the token at j is drafted from the token at j - 1 - s, its round's anchor; offset
    2 as feature heads have."""

    taps: tuple[int, ...] = (1, 2)
    vocab_map: torch.Tensor | None = None

    def __init__(self, vocab_size: int, *, hidden: int = 8, depths: int = 8, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(
            torch.randn(depths, vocab_size, hidden, generator=generator)
        )
        self.head = torch.nn.Parameter(torch.randn(vocab_size, hidden, generator=generator))

    def head_weight(self) -> torch.Tensor:
        return self.head

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        position = torch.arange(batch.input_ids.shape[1])
        real = batch.attention_mask.bool()
        for depth in range(batch.num_steps):
            anchor = (position + 1 - depth).clamp(min=0, max=len(position) - 1)
            valid = real & (position >= depth)
            yield UnrolledStep(
                hidden=self.table[depth][batch.input_ids[:, anchor]], valid=valid, offset=2
            )


@pytest.fixture
def table_drafter() -> Callable[..., TableDrafter]:
    return TableDrafter


@pytest.fixture
def write_data(tmp_path: Path) -> Callable[..., Path]:
    """`write_data(rows)` writes a data folder; each row a dict of columns."""

    def write(rows: list[dict], *, name: str = "data", provenance: dict | None = None) -> Path:
        unknown = {"target": "t", "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        return write_rows(tmp_path / name, rows, provenance or unknown)

    return write


@pytest.fixture(scope="session")
def answered(
    tiny_target: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], tuple[str, str]]:
    """`answered(count)`: folders of the tiny Llama, and of its sampled answers to so many random
    prompts of 5 tokens, which tests do not change."""

    @functools.cache
    def make(count: int) -> tuple[str, str]:
        folder = tiny_target("llama")
        target = Target.load(folder)
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(3, 288, (5,), generator=generator).tolist() for _ in range(count)]
        answers = target.answer(prompts, max_new_tokens=12, temperature=1.0, batch_size=count)
        rows = rows_of(prompts, answers)
        provenance = {
            "target_revision": target.revision, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
        }  # fmt: skip
        data = tmp_path_factory.mktemp("answered") / "data"
        return folder, str(write_rows(data, rows, provenance))

    return make


@pytest.fixture
def configure(
    answered: Callable[[int], tuple[str, str]], tmp_path: Path
) -> Callable[..., TrainConfig]:
    """A `TrainConfig` for answers of the tiny Llama."""
    folder, data = answered(24)

    def config(family: str = "eagle3", **changes: object) -> TrainConfig:
        values = {
            "target": folder,
            "data": data,
            "out": str(tmp_path / "draft"),
            "dtype": "float32",
            "held_out": 0.2,
        }
        return TrainConfig(
            family=family,
            **values
            | {"steps": 40, "log_every": 5, "batch_size": 8, "optim": FAST, "eval_prompts": 0}
            | changes,
        )

    return config
