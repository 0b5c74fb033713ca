"""The names of the stand-ins in SGLang's own source: of the environment that `scripts/test --all`
makes, or of the folder that `DRAFTSMITH_SGLANG_SOURCE` names. Nothing of it is imported; its reader
of pushed weights is run by itself."""

from __future__ import annotations

import ast
import base64
import io
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.fleet.sglang import plugin
from draftsmith.fleet.sglang.push import push
from tests.unit.fleet.sglang.stand_ins import REQ, SAMPLING_PARAMS, VERIFY_INPUT


def source() -> Path | None:
    if named := os.environ.get("DRAFTSMITH_SGLANG_SOURCE"):
        return Path(named)
    clients = Path(os.environ.get("DRAFTSMITH_CLIENTS") or ".venv-clients")
    return next(clients.glob("sglang/lib/python*/site-packages/sglang"), None)


SOURCE = source()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(SOURCE is None, reason="no source of SGLang is here"),
]


def read(path: str) -> ast.Module:
    assert SOURCE is not None
    return ast.parse((SOURCE / "srt" / path).read_text(encoding="utf-8"))


def named(tree: ast.AST, name: str) -> Any:
    return next(one for one in ast.walk(tree) if getattr(one, "name", None) == name)


def fields(tree: ast.AST, name: str) -> set[str]:
    found = [one.target for one in named(tree, name).body if isinstance(one, ast.AnnAssign)]
    return {one.id for one in found if isinstance(one, ast.Name)}


def test_the_verification_has_the_call_that_is_read() -> None:
    function = named(read("speculative/eagle_utils.py"), "eagle_sample")
    assert [one.arg for one in function.args.args][:3] == plugin.READ
    returned = [
        [getattr(part, "id", "") for part in one.value.elts]
        for one in ast.walk(function)
        if isinstance(one, ast.Return) and isinstance(one.value, ast.Tuple)
    ]
    assert ["predict", "accept_lens", "accept_index"] in returned


def test_all_that_is_read_is_there() -> None:
    assert set(VERIFY_INPUT) <= fields(read("speculative/eagle_info.py"), "EagleVerifyInput")
    assert set(SAMPLING_PARAMS) <= fields(read("sampling/sampling_params.py"), "SamplingParams")
    request = named(read("managers/schedule_batch.py"), "Req")
    names = {one.attr for one in ast.walk(request) if isinstance(one, ast.Attribute)}
    names |= {one.name for one in ast.walk(request) if isinstance(one, ast.FunctionDef)}
    assert set(REQ) <= names


def test_the_updates_have_the_fields_that_are_sent() -> None:
    tree = read("managers/io_struct.py")
    sent = {"serialized_named_tensors", "selector", "flush_cache", "weight_version"}
    assert sent <= fields(tree, "UpdateWeightsFromTensorReqInput")
    assert "selector" in fields(tree, "BeginWeightUpdateReqInput")
    assert "'sglang.srt.plugins'" in ast.unparse(read("plugins/__init__.py"))
    register = named(read("plugins/hook_registry.py"), "register")
    assert [one.arg for one in register.args.args] == ["cls", "target", "hook", "hook_type"]


def test_what_is_pushed_is_read_by_sglangs_own_reader(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(2, 3).bfloat16(), "a": torch.arange(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    sent: list[dict[str, Any]] = []

    def post(url: str, *, json: dict[str, Any]) -> Any:
        sent.append(json)
        return SimpleNamespace(status_code=200, json=lambda: {"success": True})

    push(SimpleNamespace(post=post), tmp_path, "7")
    tree = read("utils/common.py")
    names = ("SafeUnpickler", "_safe_load_torch_storage")
    parts = [ast.unparse(named(tree, name)) for name in names]
    space: dict[str, Any] = {"pickle": pickle, "io": io, "torch": torch}
    exec("from __future__ import annotations\n" + "\n".join(parts), space)
    (payload,) = sent[1]["serialized_named_tensors"]
    found = space["SafeUnpickler"](io.BytesIO(base64.b64decode(payload))).load()
    assert [name for name, _ in found] == ["a", "b"]
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found)
