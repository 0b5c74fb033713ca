"""Where a rollback can return to, and which versions are kept for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from draftsmith.distill.config import DistillConfig, DriftConfig, RetentionConfig
from draftsmith.distill.gate.drift import Drift
from draftsmith.distill.gate.gate import Decision
from draftsmith.distill.publisher import Publisher
from draftsmith.distill.version_lifecycle import HINT_EVERY, VersionLifecycle
from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.options import MtpOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target


@pytest.fixture
def made(tmp_path: Path, target: Target) -> Callable[..., Publisher]:
    """Versions in a row, each the parent of the next, made for the given revisions of
    the target."""
    draft = FAMILIES["mtp"].create(MtpOptions(), target, seed=0)

    def publish(*revisions: str) -> Publisher:
        for number, revision in enumerate(revisions):
            versions.publish(
                tmp_path, lambda folder: checkpoint.save(draft, folder, target), family="mtp",
                target={"revision": revision},
                parent=number or None, data_range={}, gate={},
            )  # fmt: skip
        return Publisher(tmp_path, "", target)

    return publish


def test_a_rollback_returns_to_the_nearest_version_that_is_whole_and_made_for_this_target(
    made: Callable[..., Publisher], target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    own = target.revision
    publisher = made(own, own, "another", own)
    assert publisher.version == 4 and publisher.parent_version == 2
    assert (
        "version 4 cannot be rolled back to version 3: it was made for target revision another"
        in caplog.text
    )
    (versions.folder_of(publisher.root, 2) / "model.safetensors").write_bytes(b"torn")
    # What the decision compared with is gone: nothing is proven about the one before it.
    assert (
        not publisher.roll_back(2)
        and versions.latest(publisher.root) == 4
        and publisher.parent_version == 1
    )
    assert publisher.roll_back(1) and publisher.version == versions.latest(publisher.root) == 1
    assert publisher.parent_version is None and publisher.open_floor() == (None, None)


def test_a_chain_whose_link_was_deleted_ends_there(
    made: Callable[..., Publisher], target: Target
) -> None:
    publisher = made(target.revision, "another", target.revision)
    assert publisher.parent_version == 1
    shutil.rmtree(versions.folder_of(publisher.root, 2))
    publisher.reload()
    assert publisher.parent_version is None


def test_the_floor_is_the_first_version_that_is_whole_and_made_for_this_target(
    made: Callable[..., Publisher], target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    own = target.revision
    publisher = made("another", *[own] * 5)
    assert publisher.parent_version == 5 and list(publisher.own_versions()) == [2, 3, 4, 5, 6]
    version, drafter = publisher.open_floor()
    assert version == 2 and drafter is not None and drafter is not publisher.parent
    (versions.folder_of(publisher.root, 2) / "model.safetensors").write_bytes(b"torn")
    (versions.folder_of(publisher.root, 3) / versions.MANIFEST).unlink()
    assert (
        publisher.open_floor()[0] == 4
        and "version 6 cannot be rolled back to version 2" in caplog.text
    )
    # It is the parent, or the live version itself: there is nothing more to hold it to.
    assert (
        publisher.roll_back(5)
        and publisher.parent_version == 4
        and publisher.open_floor() == (None, None)
    )
    assert (
        publisher.roll_back(4)
        and publisher.parent_version is None
        and publisher.open_floor() == (None, None)
    )


def test_a_store_without_a_whole_version_begins_again_with_the_draft(
    made: Callable[..., Publisher], target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, draft = made(target.revision, target.revision).root, str(tmp_path / "draft")
    shutil.copytree(versions.folder_of(root, 1), draft)
    for version in (1, 2):
        (versions.folder_of(root, version) / "model.safetensors").write_bytes(b"torn")
    publisher = Publisher(root, draft, target)
    assert publisher.version == versions.latest(root) == 3 and publisher.parent is None
    assert (
        "version 2 is corrupt" in caplog.text and "the starting draft is published" in caplog.text
    )


@pytest.mark.parametrize("spoilt", [b"", b"two\n", b"\xff\xfe2"])
def test_a_learner_starts_beside_a_spoilt_current_file(
    made: Callable[..., Publisher], target: Target, spoilt: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    root = made(target.revision, target.revision, target.revision).root
    (versions.folder_of(root, 3) / "model.safetensors").write_bytes(b"torn")
    (root / versions.CURRENT).write_bytes(spoilt)
    publisher = Publisher(root, "", target)
    assert publisher.version == versions.latest(root) == 2 and publisher.parent_version == 1
    assert "instead of a version number" in caplog.text
    last = versions.read_decisions(root)[-1]
    assert (last["decision"], last["version"], last["left"]) == ("rolled back", 2, None)


def test_a_spoilt_current_file_without_versions_is_a_beginning(
    made: Callable[..., Publisher], target: Target, tmp_path: Path
) -> None:
    root, draft = made(target.revision).root, str(tmp_path / "draft")
    shutil.move(versions.folder_of(root, 1), draft)
    (root / versions.CURRENT).write_bytes(b"")
    assert Publisher(root, draft, target).version == versions.latest(root) == 1


def test_the_version_that_a_rollback_left_is_not_pruned(
    made: Callable[..., Publisher], target: Target
) -> None:
    publisher = made(*[target.revision] * 6)
    config = DistillConfig(
        target="", draft="", buffer="", versions="", retention=RetentionConfig(versions=1)
    )
    live = Mock(publisher=publisher)
    live.watch.displaced.version = 3
    VersionLifecycle(live, Mock(), Mock(config=config)).prune()
    assert versions.versions(publisher.root) == [1, 3, 5, 6]


def test_decisions_without_a_promotion_bring_a_hint(
    made: Callable[..., Publisher], target: Target
) -> None:
    live = Mock(publisher=made(target.revision), drift=Drift(DriftConfig(patience=0)))
    config = DistillConfig(target="", draft="", buffer="", versions="")
    context = Mock(config=config)
    lifecycle = VersionLifecycle(live, Mock(updates=1), context)
    for _ in range(HINT_EVERY):
        context.report.assert_not_called()
        lifecycle.record(Decision("hold", "no gain"))
    (told,) = context.report.call_args.args
    assert told == "8 decisions in a row without a promotion; a lower learn.lr may help"


@pytest.mark.parametrize("spoilt", ["weights", "current"])
def test_a_candidate_replaces_a_spoilt_live_version(
    made: Callable[..., Publisher], target: Target, spoilt: str
) -> None:
    publisher = made(target.revision, target.revision)
    root = publisher.root
    if spoilt == "weights":
        (versions.folder_of(root, 2) / "model.safetensors").write_bytes(b"torn")
    else:
        (root / versions.CURRENT).write_text("\0")
    config = DistillConfig(target="", draft="", buffer="", versions=str(root))
    context = Mock(config=config, counters=Mock(records=1, texts=1), cursor=dict)
    live = Mock(publisher=publisher, version=2, made_for="")
    lifecycle = VersionLifecycle(live, Mock(updates=1), context)
    lifecycle.publish(Decision("accept", "better"), nullcontext(publisher.live))
    assert versions.latest(root) == 3 and versions.open_version(root, 3).is_dir()
