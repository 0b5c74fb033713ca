"""The run folder of a training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftsmith.errors import UserError
from draftsmith.train.checkpoints import RunFolder


def test_a_run_goes_on_with_the_texts_that_it_began_with(tmp_path: Path) -> None:
    folder, lengths = RunFolder(tmp_path), np.array([4, 5, 9])
    folder.make()
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


def test_a_run_goes_on_with_the_target_that_it_began_with(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    # Nothing was trained yet: any target does.
    folder.keep_target("first")
    folder.keep_target("second")
    folder.complete(step=1, elapsed_s=0.0, processes=1, passes=1)
    folder.keep_target("second")
    with pytest.raises(UserError, match="of revision second, and this one's is third; give the"):
        folder.keep_target("third")
    (folder.training / "target.json").unlink()
    folder.keep_target("third")
