"""The target that a learner follows: new weights are seen once they are whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.distill.buffer.record_table import is_of_weights, of_earlier_weights
from draftsmith.distill.learn import text_states
from draftsmith.distill.learn.text_states import TargetFolder
from draftsmith.errors import UserError
from tests.round_records import Distribution, logged, round_record


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """`later()`: time goes on by more than files need to settle."""
    now = [0.0]
    monkeypatch.setattr(text_states.time, "monotonic", lambda: now[0])

    def pass_by() -> None:
        now[0] += 2 * text_states.SETTLED_S

    return pass_by


def weights(folder: Path, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_text(content)
    return folder


def test_a_copy_that_grows_is_left_alone_until_it_is_whole(
    tmp_path: Path, later: Callable[[], None]
) -> None:
    folder = weights(tmp_path / "target", "a")
    source = TargetFolder(str(folder))
    later()
    assert not source.is_new and not source.has_settled()
    for size in (1, 2, 3):
        weights(folder, "b" * size * 10)
        assert source.is_new and not source.has_settled()
        later()
    assert source.has_settled()
    (folder / "model.safetensors").unlink()
    assert not source.is_new and not source.has_settled(), "in the middle of a replacement"


@pytest.mark.usefixtures("later")
def test_a_file_names_the_folder_and_the_folder_its_weights(tmp_path: Path) -> None:
    weights(tmp_path / "step-1", "a")
    (weights(tmp_path / "step-2", "b") / text_states.WEIGHT_VERSION).write_text("2\n")
    named = tmp_path / "current"
    named.write_text("step-1\n")
    source = TargetFolder(str(named))
    assert (source.folder, source.weight_version) == (str(tmp_path / "step-1"), "")
    (tmp_path / "new").write_text("step-2\n")
    weights(tmp_path / "step-1", "of another step")
    assert not source.has_settled(), "a named folder that grows"
    os.replace(tmp_path / "new", named)
    assert source.has_settled(), "a learner that looks more rarely than folders come follows too"
    again = TargetFolder(str(named))
    assert (again.folder, again.weight_version) == (str(tmp_path / "step-2"), "2")
    assert not again.is_new
    named.write_text("")
    assert not again.is_new
    with pytest.raises(UserError, match="empty file"):
        TargetFolder(str(named))


def test_a_hub_id_never_changes() -> None:
    source = TargetFolder("somebody/model")
    assert (source.folder, source.weight_version) == ("somebody/model", "")
    assert not source.is_new and not source.has_settled()


def test_records_of_earlier_weights_keep_their_tokens_alone() -> None:
    p = logged(Distribution([7], [-0.1], 0.1))
    record = round_record(drafted=[7], accepted=1, committed=[7, 8], p=p, q=p, weight_version="6")
    assert is_of_weights(record, revision="own", weight_version="")
    assert is_of_weights(record, revision="own", weight_version="6")
    assert not is_of_weights(record, revision="own", weight_version="7")
    begun = replace(record, target_revision="before")
    assert is_of_weights(begun, revision="own", weight_version="6"), "its version decides"
    assert not is_of_weights(begun, revision="own", weight_version="")
    kept = of_earlier_weights(record, weight_version="7")
    assert (kept.context, kept.committed, kept.target_revision) == ([1], [7, 8], "@6")
    assert len(kept.p) == 1 and not kept.p.is_logged and len(kept.q) == 0
    assert not is_of_weights(kept, revision="own", weight_version="7")
