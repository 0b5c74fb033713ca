"""Swaps in a worker: a version is served as a whole or not at all, at fixed addresses, and whatever
is wrong with it leaves the served draft as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.fleet.swaps import swap as swap_module
from draftsmith.fleet.swaps.packed import handles_in
from draftsmith.fleet.swaps.proposer import SwappedProposer
from draftsmith.fleet.swaps.swap import Swaps, watch
from tests.unit.fleet.swaps.stand_in import (
    CONFIG,
    WIDTH,
    expected_logits,
    logits_of,
    tensors_of_seed,
    write_version,
)
from tests.waiting import wait_until


@pytest.fixture
def swaps(worker: Any) -> Swaps:
    made = Swaps(SwappedProposer(worker), version="1")
    assert made.prepare()["state"] == "idle"
    return made


def settled(swaps: Swaps) -> dict[str, Any]:
    wait_until(lambda: swaps.status()["state"] != "working")
    return swaps.status()


def applied(swaps: Swaps, folder: Path, version: str) -> dict[str, Any]:
    swaps.stage(str(folder), version)
    found = settled(swaps)
    for step in (swaps.trial, swaps.apply):
        if found["state"] != "refused":
            found = step(version)
    return found


def serve(swaps: Swaps, folder: Path, version: str) -> dict[str, Any]:
    found = applied(swaps, folder, version)
    if found["state"] != "refused":
        swaps.look()
        found = settled(swaps)
        swaps.keep()
    return found


def addresses(model: torch.nn.Module) -> list[int]:
    return [one.data_ptr() for one in model.parameters()]


def test_a_version_is_served_at_the_addresses_of_the_one_before(
    swaps: Swaps, worker: Any, tmp_path: Path
) -> None:
    model = worker.model_runner.get_draft_model()
    before, functions = addresses(model), (model.lm_head.cpu_linear, model.values.cpu_linear)
    embeddings = worker.model_runner.target.embed_tokens.weight.clone()
    for seed in (2, 3, 2):
        found = serve(swaps, write_version(tmp_path / f"v{seed}", tensors_of_seed(seed)), str(seed))
        assert found["state"] == "looked" and found["matches"] and found["version"] == str(seed)
        torch.testing.assert_close(logits_of(model), expected_logits(tensors_of_seed(seed)))
        assert swaps.staging is not None
        handles = [handles_in(one) for one in (swaps.staging.served(), swaps.staging.slots())]
        assert len({int(one.address) for both in handles for one in both.values()}) == 4
    assert addresses(model) == before
    assert (model.lm_head.cpu_linear, model.values.cpu_linear) == functions
    assert torch.equal(worker.model_runner.target.embed_tokens.weight, embeddings)
    assert torch.equal(model.attention.kv_cache, torch.ones(3, 5))
    assert swaps.num_swaps == 3 and swaps.last_swap["pause_ms"] >= 0


def test_nothing_is_copied_where_a_version_is_loaded_already(
    swaps: Swaps, worker: Any, tmp_path: Path
) -> None:
    found = serve(swaps, write_version(tmp_path / "same", tensors_of_seed(1)), "7")
    assert found["version"] == "7" and found["last_swap"]["changed"] == 0
    assert found["last_swap"]["recent_tokens"] == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"norm": torch.tensor([torch.inf] + [1.0] * (WIDTH - 1))}, "'norm' of .* NaN or infinite"),
        (
            {"values.weight": torch.zeros(3, 3)},
            "'values.weight'.*F32\\[3, 3\\], of the served draft F32\\[4, 8\\]",
        ),
        ({"norm": None}, "lacks 'norm'"),
        ({"other.weight": torch.zeros(2)}, "has 'other.weight'"),
        ({"norm": torch.ones(WIDTH).half()}, "F16"),
        (dict.fromkeys(tensors_of_seed(2)), "no tensors"),
        (
            {name: 1e38 * tensors_of_seed(2)[name] for name in ("values.weight", "lm_head.weight")},
            "not finite",
        ),
    ],
)
def test_a_spoilt_version_leaves_the_served_one(
    swaps: Swaps,
    worker: Any,
    tmp_path: Path,
    changes: dict[str, torch.Tensor | None],
    sentence: str,
) -> None:
    spoilt = tensors_of_seed(2) | changes
    tensors = {name: one for name, one in spoilt.items() if one is not None}
    check_refused(swaps, worker, write_version(tmp_path / "v2", tensors), sentence, tmp_path)


HALF_UPLOADED = {"weight_map": {"norm": "model.safetensors", "more": "model-2.safetensors"}}
WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("name", "spoil", "sentence"),
    [
        (WEIGHTS, lambda data: data[:-40], "damaged"),
        (WEIGHTS, lambda data: b"\0" * 100, "damaged"),
        (
            f"{WEIGHTS}.index.json",
            lambda data: json.dumps(HALF_UPLOADED).encode(),
            "model-2.safetensors' do not exist",
        ),
        (WEIGHTS, None, "model.safetensors' do not exist"),
        ("config.json", None, "config.json"),
        (
            "config.json",
            lambda data: json.dumps(CONFIG | {"architectures": ["Other"]}).encode(),
            "architectures=\\['Other'\\]",
        ),
    ],
)
def test_a_broken_folder_leaves_the_served_draft(
    swaps: Swaps,
    worker: Any,
    tmp_path: Path,
    name: str,
    spoil: Callable[[bytes], bytes] | None,
    sentence: str,
) -> None:
    folder = write_version(tmp_path / "v2", tensors_of_seed(2))
    path = folder / name
    if spoil is None:
        path.unlink()
    else:
        path.write_bytes(spoil(path.read_bytes() if path.exists() else b""))
    check_refused(swaps, worker, folder, sentence, tmp_path)


def check_refused(swaps: Swaps, worker: Any, folder: Path, sentence: str, tmp_path: Path) -> None:
    """Refused with the sentence, and the next good version is served."""
    model = worker.model_runner.get_draft_model()
    found = serve(swaps, folder, "2")
    assert found["state"] == "refused" and found["version"] == "1" and found["drafting"]
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(found["reason"])
    torch.testing.assert_close(logits_of(model), expected_logits(tensors_of_seed(1)))
    assert serve(swaps, write_version(tmp_path / "v3", tensors_of_seed(3)), "3")["matches"]
    torch.testing.assert_close(logits_of(model), expected_logits(tensors_of_seed(3)))


def test_an_error_inside_the_loader_stays_in_the_second_copy(
    swaps: Swaps, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: torch.nn.Module, tensors: Any) -> None:
        next(tensors)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(worker.model_runner.get_draft_model()), "load_weights", fail)
        found = serve(swaps, write_version(tmp_path / "v2", tensors_of_seed(2)), "2")
        assert found["state"] == "refused" and "out of memory" in found["reason"]
    assert not any(one.is_meta for one in swaps.staging.model.parameters())  # type: ignore[union-attr]
    assert serve(swaps, tmp_path / "v2", "2")["version"] == "2"


def test_a_copy_that_fails_half_way_is_taken_back(
    swaps: Swaps, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = swap_module.put

    def half(names: list[str], *slots: Any) -> None:
        put(names[:-1], *slots)
        raise RuntimeError("device lost")

    monkeypatch.setattr(swap_module, "put", half)
    found = serve(swaps, write_version(tmp_path / "v2", tensors_of_seed(2)), "2")
    assert found["state"] == "refused" and found["drafting"] and found["version"] == "1"
    model = worker.model_runner.get_draft_model()
    torch.testing.assert_close(logits_of(model), expected_logits(tensors_of_seed(1)))


def test_drafting_stops_where_the_way_back_fails(
    swaps: Swaps, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(swap_module, "put", fail)
    monkeypatch.setattr(swap_module, "handles_in", fail)
    swaps.stage(str(write_version(tmp_path / "v2", tensors_of_seed(2))), "2")
    settled(swaps)
    monkeypatch.setattr(Swaps, "_handle_digests", lambda *_: {})
    swaps.trial("2")
    assert not swaps.apply("2")["drafting"]
    runner = worker.model_runner
    assert not runner._input_fits_in_drafter(None)
    assert runner.take_draft_token_ids().draft_token_ids == [[]]


def test_drafting_stops_where_packed_weights_stay_wrong(
    swaps: Swaps, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied(swaps, write_version(tmp_path / "v2", tensors_of_seed(2)), "2")
    monkeypatch.setattr(swap_module, "exchange", lambda *_: None)
    assert not swaps.take_back()["drafting"]


def test_tables_of_the_target_are_never_written(swaps: Swaps, worker: Any, tmp_path: Path) -> None:
    """A version that brings a copy of the shared table is served if it is the same table."""
    target = worker.model_runner.target.embed_tokens.weight
    kept = target.detach().clone()
    whole = {"embed_tokens.weight": kept.clone()}
    write_version(tmp_path / "served", tensors_of_seed(1) | whole)
    assert serve(swaps, write_version(tmp_path / "v2", tensors_of_seed(2) | whole), "2")["matches"]
    other = {"embed_tokens.weight": kept + 1}
    found = serve(swaps, write_version(tmp_path / "v3", tensors_of_seed(3) | other), "3")
    assert found["state"] == "refused" and "shares it with the target" in found["reason"]
    assert torch.equal(target, kept)


def test_a_version_of_one_rank_is_taken_back_for_another(
    swaps: Swaps, worker: Any, tmp_path: Path
) -> None:
    applied(swaps, write_version(tmp_path / "v2", tensors_of_seed(2)), "2")
    assert swaps.take_back()["version"] == "1"
    model = worker.model_runner.get_draft_model()
    torch.testing.assert_close(logits_of(model), expected_logits(tensors_of_seed(1)))


def test_a_look_finds_weights_that_something_else_wrote(
    swaps: Swaps, worker: Any, tmp_path: Path
) -> None:
    serve(swaps, write_version(tmp_path / "v2", tensors_of_seed(2)), "2")
    model = worker.model_runner.get_draft_model()
    for write in (lambda: model.norm.data.mul_(2), lambda: repacked(model)):
        write()
        swaps.look()
        assert settled(swaps) | {"matches": False, "version": ""} == swaps.status()
        assert serve(swaps, tmp_path / "v2", "2")["matches"]
        torch.testing.assert_close(logits_of(model), expected_logits(tensors_of_seed(2)))


def repacked(model: torch.nn.Module) -> None:
    """As vLLM's own reload leaves a packed layer: another function with another handle."""
    model.lm_head.weight = torch.nn.Parameter(torch.ones(13, 8), requires_grad=False)
    model.lm_head.pack()


def test_updates_by_others_lose_the_version(swaps: Swaps, worker: Any) -> None:
    for name in ("start_draft_weight_update", "finish_weight_update", "sleep", "wake_up"):
        setattr(worker, name, lambda: None)
    watch(worker, swaps)
    for update in (worker.start_draft_weight_update, worker.finish_weight_update):
        swaps.version, swaps.reason = "1", ""
        update()
        assert "wrote into the draft" in swaps.reason and swaps.version == ""
    worker.sleep()
    assert swaps.stage("anything", "2")["reason"] == "the engine sleeps"
    worker.wake_up()
    assert not swaps.is_asleep and swaps.reason == "the engine slept"


def test_steps_out_of_order_are_refused(swaps: Swaps, tmp_path: Path) -> None:
    assert "not staged" in swaps.apply("2")["reason"]
    swaps.stage(str(write_version(tmp_path / "v2", tensors_of_seed(2))), "2")
    settled(swaps)
    assert "not tried" in swaps.apply("2")["reason"]
    assert "nothing" in swaps.take_back()["reason"]


def test_the_second_runner_proposes_zeros_with_their_distribution() -> None:
    from draftsmith.fleet.swaps.proposer import V2, kind_of

    speculator = SimpleNamespace(
        load_draft_model=lambda *_: None,
        draft_logits=torch.randn(4, 2, 5),
        draft_tokens=torch.ones(4, 2, dtype=torch.int64),
    )
    runner = SimpleNamespace(speculator=speculator)
    assert kind_of(runner) is V2
    V2.stop(runner)
    proposed = speculator.propose(SimpleNamespace(num_reqs=3), None, key=1)
    assert torch.equal(proposed, torch.zeros(3, 2, dtype=torch.int64))
    assert torch.equal(speculator.draft_logits.softmax(-1)[..., 0], torch.ones(4, 2))
