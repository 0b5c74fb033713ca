"""The canary and the pool on disk: read back as written, refused in one sentence, requests sorted
as they should be."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from draftsmith.drafters import versions
from draftsmith.drafters.pool import (
    POOL_FILE,
    DraftPool,
    PromptClusters,
    cluster_name,
    counts,
    next_folder,
    pool_root,
    read_pool,
    unit,
    vector,
    write_pool,
)
from draftsmith.drafters.versions import (
    CANARY,
    CANARY_SCHEMA,
    Canary,
    in_canary,
    read_canary,
    remove_canary,
    write_canary,
)
from draftsmith.errors import UserError
from draftsmith.prompts.shares import uniform

CENTROIDS = unit(np.array([[1.0, 0, 0, 0, 0, 0, 0, 0], [0, 1.0, 1.0, 0, 0, 0, 0, 0]]))


def test_files_are_read_back_as_written(tmp_path: Path) -> None:
    assert read_canary(tmp_path) is None and read_pool(tmp_path) is None
    write_canary(tmp_path, Canary(7, 0.1))
    assert read_canary(tmp_path) == Canary(7, 0.1)
    remove_canary(tmp_path)
    remove_canary(tmp_path)
    assert read_canary(tmp_path) is None
    write_pool(tmp_path, DraftPool({"code": "c01"}))
    assert read_pool(tmp_path) == DraftPool({"code": "c01"})
    write_pool(
        tmp_path,
        DraftPool(
            {"code": "c01", "(cluster 1)": "c02"},
            {"sql": "c03"},
            PromptClusters(np.linspace(0, 1, 8), CENTROIDS),
        ),
    )
    pool = read_pool(tmp_path)
    assert (
        pool is not None
        and pool.clusters is not None
        and list(pool.classes) == ["code", "(cluster 1)"]
        and pool.learning == {"sql": "c03"}
    )
    assert np.allclose(pool.clusters.centroids, CENTROIDS, atol=1e-4)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["pool", "pool.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": 2, "version": 7}',
        '{"schema": 2, "version": true, "share": 0.1}',
        '{"schema": 2, "version": 7, "share": 2}',
        '{"version": 7, "share": 0.1}',
    ],
)
def test_a_malformed_canary_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / CANARY).write_text(text)
    with pytest.raises(UserError) as told:
        read_canary(tmp_path)
    assert CANARY in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "{}",
        '{"classes": {}, "clusters": null}',
        '{"classes": ["code"], "learning": {}, "clusters": null}',
        '{"classes": {"code": "../c01"}, "learning": {}, "clusters": null}',
        '{"classes": {}, "learning": {}, "clusters": {"weights": [1, 1]}}',
        '{"classes": {}, "learning": {}, "clusters": {"weights": [1, 1], "centroids": [[1], [1]]}}',
        '{"classes": {}, "learning": {}, "clusters": {"weights": [1, NaN], "centroids": [[1, 0]]}}',
    ],
)
def test_a_malformed_pool_is_one_sentence(tmp_path: Path, text: str) -> None:
    pool_root(tmp_path).mkdir()
    (pool_root(tmp_path) / POOL_FILE).write_text(text)
    with pytest.raises(UserError) as told:
        read_pool(tmp_path)
    assert "pool file" in str(told.value) or POOL_FILE in str(told.value)
    assert "\n" not in str(told.value)


def test_the_canary_takes_its_share_whatever_is_recorded() -> None:
    requests = [f"cmpl-{number}-0" for number in range(20_000)]
    chosen = np.array([in_canary(request, 0.1) for request in requests])
    assert abs(chosen.mean() - 0.1) < 0.01
    recorded = np.array([uniform(request, "record") < 0.1 for request in requests])
    # The same draw for both would record nothing but canaries.
    assert abs((chosen & recorded).mean() - 0.01) < 0.004
    assert all(
        in_canary(request, 0.2) for request, one in zip(requests, chosen, strict=True) if one
    )


def test_another_draw_of_the_canary_has_another_schema() -> None:
    chosen = [number for number in range(40) if in_canary(f"r{number}", 0.1)]
    assert (CANARY_SCHEMA, chosen) == (2, [4, 28, 30, 36, 37])


def test_a_request_goes_by_its_tag_then_by_its_prompt() -> None:
    weights = np.ones(8)
    prompts = {
        name: next(token for token in range(1000) if counts([token], 8)[name]) for name in range(8)
    }
    pool = DraftPool(clusters=PromptClusters(weights, CENTROIDS))
    assert pool.class_of("code", [prompts[0]]) == "code"
    assert pool.class_of("", [prompts[0]] * 3 + [prompts[1]]) == cluster_name(0)
    assert pool.class_of("", [prompts[1], prompts[2], prompts[2]]) == cluster_name(1)
    assert pool.class_of("", [prompts[7]]) == "" and pool.class_of("", []) == ""
    assert DraftPool().class_of("", [prompts[0]]) == ""


def test_buckets_share_tokens_evenly_and_a_vector_has_length_one() -> None:
    spread = counts(range(32_000), 256)
    assert spread.sum() == 32_000 and spread.min() > 60 and spread.max() < 190
    assert np.isclose(np.linalg.norm(vector([5, 5, 9], np.ones(256))), 1.0)


def test_leftovers_of_a_kill_are_swept(tmp_path: Path) -> None:
    for name in (CANARY, "status.json"):
        (tmp_path / f".{name}.0123abcd.tmp").write_text("{")
    (tmp_path / ".v000003.00000000.old").mkdir()
    (tmp_path / ".by-hand.tmp").write_text("of somebody else")
    versions.publish(
        tmp_path, lambda folder: None, family="fake", target={}, parent=None, data_range={}, gate={}
    )
    assert {path.name for path in tmp_path.glob(".*")} == {".by-hand.tmp"}


def test_they_import_no_torch() -> None:
    code = (
        "import sys, draftsmith.drafters.versions, draftsmith.drafters.pool; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_folder_means_two_classes_and_one_that_never_began_is_used_again(tmp_path: Path) -> None:
    root = pool_root(tmp_path)
    assert next_folder(tmp_path) == "c01"
    for number in (1, 2):
        versions.publish(
            root / next_folder(tmp_path),
            lambda folder: None,
            family="fake",
            target={},
            parent=None,
            data_range={},
            gate={},
        )
        assert next_folder(tmp_path) == f"c{number + 1:02d}"
    (root / "c03").mkdir()  # as a full disk leaves it
    assert next_folder(tmp_path) == "c03"
    shutil.rmtree(root / "c02" / "v000001")  # as a class that lost its draft
    assert next_folder(tmp_path) == "c03"
