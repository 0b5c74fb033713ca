"""The names of the stand-ins in SGLang's own source: where it is installed, or where
DRAFTSMITH_SGLANG_SOURCE names its folder. Nothing of it is imported."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from draftsmith.fleet.sglang import plugin
from tests.unit.fleet.sglang.stand_ins import REQ, SAMPLING_PARAMS, VERIFY_INPUT


def source() -> Path | None:
    named = os.environ.get("DRAFTSMITH_SGLANG_SOURCE")
    if named:
        return Path(named)
    found = importlib.util.find_spec("sglang")
    return Path(found.origin).parent if found is not None and found.origin else None


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
