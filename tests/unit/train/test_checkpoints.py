"""The run folder of a training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftsmith.errors import UserError
from draftsmith.train.checkpoints import BestDraft, RunFolder, is_evaluated, keep_until
from draftsmith.train.config import TrainConfig


def test_a_run_goes_on_with_the_texts_that_it_began_with(tmp_path: Path) -> None:
    folder, lengths = RunFolder(tmp_path), np.array([4, 5, 9])
    folder.training.mkdir(parents=True)
    # Nothing was trained yet: any texts do.
    folder.keep_data(np.array([1]))
    folder.keep_data(lengths)
    folder.complete(step=1, elapsed_s=0.0, processes=1, passes=1)
    folder.keep_data(lengths)
    with pytest.raises(UserError, match=r"\(3 of 18 tokens, now 4 of 20\); give the same data"):
        folder.keep_data(np.array([4, 5, 9, 2]))
    with pytest.raises(UserError, match="holds a run on other texts"):
        folder.keep_data(lengths[::-1])
    # Of a run from before there was such a record.
    (folder.training / "data.json").unlink()
    folder.keep_data(lengths)


class Draft:
    family = "mtp"

    def save(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        (lambda best: (best / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda best: (best / "model.safetensors").write_bytes(b"w"), "is not whole"),
        (lambda best: (best / "config.json").write_bytes(bytes(2)), "config.json' is not valid"),
        (lambda best: shutil.rmtree(best), "its folder or its record is missing"),
        (lambda best: (best.parent / "best.json").unlink(), "its folder or its record is missing"),
    ],
)
def test_a_run_does_not_go_on_with_a_best_draft_that_is_damaged(
    tmp_path: Path, damaged: Callable[[Path], object], says: str
) -> None:
    folder = RunFolder(tmp_path)
    config = TrainConfig(family="mtp", target="t", data=("d",), out=str(tmp_path))
    folder.training.mkdir(parents=True)
    folder.open(config)
    folder.check(config)
    best = BestDraft(folder.training)
    best.offer(Draft(), step=2, tau=1.5, evaluation=[])
    folder.complete(step=1, elapsed_s=0.0, processes=1, passes=config.accumulate)
    folder.complete(step=2, elapsed_s=0.0, processes=1, passes=config.accumulate)
    folder.check(config)
    damaged(folder.training / "best-2")
    with pytest.raises(UserError, match=f"the best draft in .* cannot be read .*{says}"):
        folder.check(config)
    for path in folder.training.glob("best*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.check(config)


def test_a_run_goes_on_from_a_kill_before_the_record_of_its_best_draft(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.training.mkdir(parents=True)
    BestDraft(folder.training).offer(Draft(), step=4, tau=1.5, evaluation=[])
    (folder.training / "best.json").unlink()
    BestDraft(folder.training).check(2)


def test_a_deepspeed_run_goes_on_with_as_many_processes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has a part of the optimizer's state."""
    folder = RunFolder(tmp_path)
    config = TrainConfig(family="mtp", target="t", data=("d",), out=str(tmp_path), accumulate=2)
    sharded = replace(config, deepspeed="zero2.json")
    folder.training.mkdir(parents=True)
    folder.open(sharded)
    folder.complete(step=1, elapsed_s=0.0, processes=1, passes=2)
    folder.check(sharded)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="a run of 1 processes with DeepSpeed, and 2 run; start as"):
        folder.check(replace(sharded, accumulate=1))
    folder.open(replace(config, resume=False))
    folder.complete(step=1, elapsed_s=0.0, processes=1, passes=2)
    folder.check(replace(config, accumulate=1))


def test_a_run_goes_on_with_the_target_that_it_began_with(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.training.mkdir(parents=True)
    # Nothing was trained yet: any target does.
    folder.keep_target("first")
    folder.keep_target("second")
    folder.complete(step=1, elapsed_s=0.0, processes=1, passes=1)
    folder.keep_target("second")
    with pytest.raises(UserError, match="of revision second, and this one's is third; give the"):
        folder.keep_target("third")
    (folder.training / "target.json").unlink()
    folder.keep_target("third")


def test_what_a_crash_left_in_the_metrics_is_dropped(tmp_path: Path) -> None:
    metrics, kept = tmp_path / "metrics.jsonl", '{"step": 1}\n{"step": 2, "eval_tau": 2}\n'
    metrics.write_bytes(kept.encode() + b'{"step": 3}\n7\n"eval_tau"\n\xf3\0\n{"step": 1, "lo')
    assert is_evaluated(metrics, 2) and not is_evaluated(metrics, 1)
    keep_until(metrics, 2)
    assert metrics.read_text() == kept
