"""Small JSON files that are no objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.train.checkpoints import BestDraft, RunFolder
from draftsmith.train.config import TrainConfig
from draftsmith.train.pipeline import read_record


@pytest.mark.parametrize("text", ["[1, 2]", "7", "null", '"run"'])
def test_json_that_is_no_object_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(
        UserError, match=r"record of the run .* instead of a JSON object; "
    ) as error:
        read_json(path, "record of the run")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def resume(root: Path) -> None:
    folder = RunFolder(root)
    folder.complete(step=1, elapsed_s=0.0, processes=1, passes=1)
    folder.check(TrainConfig(family="mtp", target="", data=(), out=str(root)))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("run.json", read_record),
        ("training/run.json", resume),
        ("training/data.json", lambda root: RunFolder(root).keep_data(np.array([4]))),
        ("training/best.json", lambda root: BestDraft(root / "training").read()),
        ("training/checkpoint-1/complete.json", lambda root: RunFolder(root).newest()),
    ],
)
def test_a_run_folder_that_holds_a_list_for_a_record_is_refused(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[3]")
    with pytest.raises(UserError, match="holds '\\[3\\]' instead of a JSON object"):
        read(tmp_path)
