"""Memory of a target whole, in shares and offloaded, and the options with which it fits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.cli import main
from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.check import memory
from draftsmith.train.check.finding import FAIL, OK, WARN
from draftsmith.train.check.memory import (
    Parts,
    check_fit,
    check_training,
    num_bytes,
    outlined_parts,
    parts_of,
    ways_to_fit,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_next"])
def test_layers_made_of_other_tensors_are_found(kind: str, tiny_target: Callable[..., str]) -> None:
    """As opening the files finds them."""
    parts = outlined_parts(folder := tiny_target(kind), "auto", trust_remote_code=False)
    assert parts is not None and parts.converts is (kind != "llama")
    says = (
        pytest.raises(UserError, match="made of other tensors") if parts.converts else nullcontext()
    )
    with says:
        load_target(folder, device="cpu", offload="disk", trust_remote_code=False)


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

    def ways(room: int, device: torch.device, host: int, **options: object) -> str:
        machine(monkeypatch, room, host)
        return ways_to_fit(parts, device, **options)  # type: ignore[arg-type]

    assert ways(100, CUDA, 500) == (
        "give --target-shares 4 on as many devices, or --target-offload cpu"
    )
    assert ways(100, CUDA, 150).endswith("--target-offload disk"), "the host has no room either"
    assert ways(131, CPU, 131) == (
        "give --target-shares 2 on as many machines, or --target-offload disk"
    )
    assert ways(51, CUDA, 500) == "give --target-offload cpu"
    assert ways(51, CUDA, 500, offloads=False) == ""
    assert ways(100, CUDA, 500, beside=49) == "give --target-offload cpu"
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
    assert there.keys() <= here.keys()
    # Layers that are read for every pass are laid out in no way.
    assert here.keys() - there.keys() == {"cpu.ways"}
    del here["cpu.ways"]
    assert all(one["status"] == there[name]["status"] for name, one in here.items())
    assert "of layers in its files" in there["memory.training"]["what"]
    assert here["memory.serving"]["what"] == there["memory.serving"]["what"], "it holds all"
