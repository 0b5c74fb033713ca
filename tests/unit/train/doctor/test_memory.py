"""Memory of a target whole, in shares and offloaded, and the options with which it fits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.cli import main
from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters.target.offload.hooks import weights_of_hooks
from draftsmith.drafters.target.offload.layer_files import Converted
from draftsmith.drafters.target.taps import body_name, decoder_layers
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.doctor import memory, offline, processes
from draftsmith.train.doctor.config import DoctorConfig
from draftsmith.train.doctor.finding import FAIL, OK, WARN, fail, ok
from draftsmith.train.doctor.memory import (
    GIB,
    Parts,
    Served,
    check_fit,
    check_training,
    num_bytes,
    outlined_parts,
    parts_of,
    ways_to_fit,
)
from draftsmith.train.plan import make
from draftsmith.train.plan.candidates import Candidate
from draftsmith.train.plan.config import PlanConfig
from draftsmith.train.plan.costs import data_of
from draftsmith.train.plan.timing import RoundTimes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@given(st.integers(0, 100), st.lists(st.integers(1, 100), min_size=1, max_size=9))
def test_memory_of_a_device_is_bounded_by_the_whole(beside: int, layers: list[int]) -> None:
    parts = Parts(beside, tuple(layers))
    assert parts.on_device() == parts.whole == beside + sum(layers)
    offloaded = parts.on_device(offload="cpu")
    assert offloaded == beside + max(layers) <= parts.whole
    assert parts.on_device(offload="disk") == offloaded, "nothing is converted"
    assert parts.on_device(shares=64) >= offloaded, "the next layer is gathered beside it"
    assert parts.on_device(shares=4) <= parts.on_device(shares=2)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "mixtral"])
def test_an_outline_tells_what_a_loaded_target_takes(
    kind: str, tiny_target: Callable[..., str]
) -> None:
    folder = tiny_target(kind)
    target = Target.load(folder, dtype=torch.float32)
    parts = outlined_parts(folder, torch.float32, trust_remote_code=False)
    assert parts == parts_of(target.model) and parts.whole == num_bytes(target.model)
    half = outlined_parts(folder, torch.bfloat16, trust_remote_code=False)
    assert half is not None and half.layers == tuple(layer // 2 for layer in parts.layers)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_next", "olmo_hybrid"])
def test_what_is_converted_counts_twice_where_files_are_read(
    kind: str, tiny_target: Callable[..., str]
) -> None:
    """Against what opening the files finds."""
    folder = tiny_target(kind)
    model = load_target(folder, device="cpu", offload="disk", trust_remote_code=False).model
    maps = [one.dataset for one in weights_of_hooks(model)]
    made = {name for one in maps if isinstance(one, Converted) for name in one.files.first}
    body = decoder_layers(getattr(model, body_name(model)), model.config.num_hidden_layers)
    names = {id(own): name for name, own in model.named_parameters()}
    twice = [sum(own.nbytes for own in one.parameters() if names[id(own)] in made) for one in body]
    parts = parts_of(model)
    assert parts.converted == tuple(twice) and (sum(twice) > 0) is (kind != "llama")
    peak = max(layer + more for layer, more in zip(parts.layers, twice, strict=True))
    assert parts.on_device(offload="disk") == parts.beside + peak
    assert parts.on_device(offload="cpu") == parts.beside + max(parts.layers)


def test_an_offload_that_fits_by_half_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(10, (20,) * 8, (18,) * 8)
    need = "give --target-offload"
    for room, device, says in ((48, CPU, False), (49, CPU, True), (31, CUDA, True)):
        machine(monkeypatch, room, 500)
        assert (need in ways_to_fit(parts, device)) is says


BROKEN = "raise TypeError('of its own')\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "nope"}, "cannot be loaded (KeyError: 'nope')"),
        ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, "(KeyError: 'nope')"),
        ({"auto_map": {"AutoConfig": "own.Config"}}, "(TypeError: of its own)"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "(TypeError: of its own)"),
    ],
)
def test_a_configuration_that_nothing_can_be_made_of_gives_a_sentence(
    change: dict[str, Any],
    says: str,
    tiny_target: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(tiny_target("llama"), folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | change))
    (folder / "own.py").write_text(BROKEN)
    words = ["--target", str(folder), "--trust-remote-code"]
    assert outlined_parts(str(folder), "auto", trust_remote_code=True) is None
    assert main(["doctor", *words, "--max-length", "64"]) == 1
    assert says in capsys.readouterr().out
    for options in ([], ["--target-offload", "disk"]):
        assert main(["plan", *words, *options]) == 2
        said = capsys.readouterr().err
        assert says in said and "Traceback" not in said


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_all_processes_leave_where_one_has_no_room(
    command: str,
    tiny_target: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """This process has room and the other one has not."""
    mend = "give --target-offload disk"
    lacking = fail("target.fits", "9 GiB of weights", mend)

    def of_both(own: object) -> list[object]:
        return [own, lacking]

    def loaded(*_: object, **__: object) -> None:
        raise UserError("it is loaded; leave before")

    monkeypatch.setattr(processes, "gathered", of_both)
    monkeypatch.setattr(offline, "check_group", lambda: [])
    monkeypatch.setattr(offline, "leave_group", lambda: None)
    monkeypatch.setattr(make, "join", lambda _: None)
    monkeypatch.setattr(make, "leave_group", lambda: None)
    monkeypatch.setattr(make.dist, "get_rank", lambda: 0)
    for module in (offline, make):
        monkeypatch.setattr(module, "load_target", loaded)
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = [command, "--target", tiny_target("llama"), "--target-shares", "2"]
    assert main(words) == (1 if command == "doctor" else 2)
    said = capsys.readouterr()
    assert "process 1: 9 GiB of weights" in said.out + said.err
    assert mend in said.out + said.err
    found = processes.fit_of_all(None)
    assert found is not None and found.status == FAIL
    monkeypatch.setattr(processes, "gathered", lambda own: [own, None, ok("target.fits", "room")])
    assert processes.fit_of_all(None) is None


def test_an_unreadable_target_has_no_outline(tmp_path: Path) -> None:
    assert outlined_parts(str(tmp_path / "none"), "auto", trust_remote_code=False) is None
    settings = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert outlined_parts(str(tmp_path), "auto", trust_remote_code=False) is None


def machine(monkeypatch: pytest.MonkeyPatch, device: int, host: int) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda _: device)
    monkeypatch.setattr(memory, "host_bytes", lambda: host)


def test_the_options_that_are_named_are_those_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(10, (20,) * 8)
    server = "train with --target-server URL of a server that holds it"

    def ways(room: int, device: torch.device, host: int, **options: object) -> str:
        machine(monkeypatch, room, host)
        return ways_to_fit(parts, device, **options)  # type: ignore[arg-type]

    assert ways(100, CUDA, 500) == (
        f"give --target-shares 4 on as many devices, or --target-offload cpu, or {server}"
    )
    assert "--target-offload disk, or" in ways(100, CUDA, 150), "the host has no room either"
    assert ways(131, CPU, 131) == (
        f"give --target-shares 2 on as many machines, or --target-offload disk, or {server}"
    )
    assert ways(31, CUDA, 500) == f"give --target-offload cpu, or {server}"
    assert ways(31, CUDA, 500, without=["offload"]) == f"give {server}"
    assert ways(100, CUDA, 500, beside=69) == f"give --target-offload cpu, or {server}"
    assert ways(10, CUDA, 500) == ways(100, CUDA, 500, beside=90) == ""


def test_a_target_that_does_not_fit_is_refused_before_it_is_loaded(
    tiny_target: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tiny_target("llama")
    parts = outlined_parts(folder, torch.float32, trust_remote_code=False)
    assert parts is not None
    need = {"dtype": torch.float32, "trust_remote_code": False}
    machine(monkeypatch, parts.whole + 1, 2**40)
    found = check_fit(folder, CPU, **need)
    assert found is not None and found.status == OK
    machine(monkeypatch, parts.whole, 2**40)
    found = check_fit(folder, CPU, **need)
    assert found is not None and found.status == FAIL and "--target-offload disk" in found.mend
    found = check_fit(folder, CPU, offload="disk", **need)
    assert found is not None and found.status == OK
    machine(monkeypatch, parts.whole, sum(parts.layers))
    found = check_fit(folder, CPU, offload="cpu", **need)
    assert found is not None and found.mend == "give --target-offload disk"
    monkeypatch.setattr(Target, "load", None)
    assert main(["doctor", "--target", folder, "--max-length", "64", "--json"]) == 1
    (only,) = json.loads(capsys.readouterr().out)["findings"]
    assert (only["check"], only["status"]) == ("target.fits", FAIL)
    assert "--target-offload disk" in only["mend"]
    assert main(["plan", "--target", folder]) == 2
    said = capsys.readouterr().err
    assert "the target does not fit: " in said and "--target-offload disk" in said
    assert "Traceback" not in said
    assert main(["plan", "--target", folder, "--target-shares", "2"]) == 2
    assert "start 2 processes with torchrun" in capsys.readouterr().err


def test_a_draft_too_large_beside_its_target_is_told_what_frees_the_target(
    tiny_target: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(tiny_target("llama"), dtype=torch.float32)
    draft = FAMILIES["eagle3"].create(OPTIONS["eagle3"](), target, seed=0)
    own = 16 * sum(one.numel() for one in draft.parameters() if one.requires_grad)
    parts = parts_of(target.model)

    def found(room: int, **options: str) -> tuple[str, str]:
        machine(monkeypatch, room, 2**40)
        one = check_training(target, draft, 64, **options)
        return one.status, one.mend

    assert found(own + parts.whole + 1) == (OK, "")
    status, mend = found(own + parts.whole)
    assert status == WARN and "--target-offload disk" in mend
    assert found(own + parts.whole, offload="disk") == (OK, "")
    status, mend = found(own)
    assert status == WARN and mend == "use --deepspeed recipes/zero3.json or a smaller draft"


def test_buffers_of_a_captured_draft_are_counted_where_it_is_served(
    tiny_target: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By `plan` and by `doctor`, which capture it as a server does."""
    folder, draft = tiny_target("llama"), str(tmp_path / "draft")
    target = Target.load(folder, dtype=torch.float32)
    head = FAMILIES["eagle3"].create(OPTIONS["eagle3"](), target, seed=0)
    checkpoint.save(head, draft, target)
    captured: list[object] = []
    monkeypatch.setattr(type(head), "capture_forward", lambda self: captured.append(self))
    buffers = property(lambda self: 3 * GIB * (self in captured))
    monkeypatch.setattr(type(head), "buffer_bytes", buffers)
    monkeypatch.setattr(make, "time_rounds", lambda *args, **options: RoundTimes(1.0, {}, {}, {}))
    findings = offline.check_pair(DoctorConfig(target=folder, draft=draft))
    (serving,) = [one.what for one in findings if one.check == "memory.serving"]
    assert "buffers of the draft 3 GiB" in serving
    small = Target.load(folder, dtype=torch.bfloat16)
    config = PlanConfig(target=folder, families=("eagle3",), context=32, streams=(1,))
    candidate = Candidate("eagle3", OPTIONS["eagle3"](), [])
    planned = make.plan_for(config, small, candidate, data_of(10, 1.0), None, None)
    assert planned.serve_memory_bytes == 3 * GIB + Served.of(small, head.bfloat16()).whole(1, 32)


def test_an_offloaded_target_is_examined(
    tiny_target: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, draft = tiny_target("llama"), str(tmp_path / "draft")
    target = Target.load(folder, dtype=torch.float32)
    checkpoint.save(FAMILIES["eagle3"].create(OPTIONS["eagle3"](), target, seed=0), draft, target)
    capsys.readouterr()  # what DeepSpeed says where this test is the first to import it
    words = ["doctor", "--target", folder, "--draft", draft, "--max-length", "64", "--json"]
    found = []
    for options in ([], ["--target-offload", "disk"]):
        assert main([*words, *options]) == 0
        said = json.loads(capsys.readouterr().out)["findings"]
        found.append({one["check"]: one for one in said})
    here, there = found
    assert there.keys() - here.keys() == {"target.offload"}
    # Layers that are read for every pass are laid out in no way.
    assert here.keys() - there.keys() == {"cpu.ways"}
    del here["cpu.ways"]
    assert {name: one["status"] for name, one in here.items()}.items() <= {
        name: one["status"] for name, one in there.items()
    }.items()
    what = there["target.offload"]["what"]
    assert "GiB of layers are in its files and read for every pass" in what
    assert "of layers in its files" in there["memory.training"]["what"]
    assert here["memory.serving"]["what"] == there["memory.serving"]["what"], "it holds all"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--target", "T", "--target-offload", "cpu"], "target_offload is 'cpu' and the target"),
        (["--target", "T", "--target-offload", "disk", "--target-shares", "2"], "leave one of"),
        (["--url", "http://h:1", "--target-offload", "disk"], "no target is given"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(
    options: list[str],
    says: str,
    tiny_target: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2" if "--target-shares" in options else "1")
    words = [tiny_target("llama") if one == "T" else one for one in options]
    assert main(["doctor", *words]) != 0
    said = capsys.readouterr()
    assert says in said.out + said.err
