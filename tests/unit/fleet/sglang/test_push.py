"""Versions go to the draft alone, keep cached prefixes, and are refused by SGLang or the store in
one sentence."""

from __future__ import annotations

import base64
import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.fleet.sglang.push import Follower, Refused, push
from draftsmith.fleet.store.errors import StoreError

TENSORS = {"a.weight": torch.randn(3, 2).bfloat16(), "b": torch.arange(4.0)}
# Globals that SGLang's unpickler lets through, of those that tensors need.
ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"), ("torch.storage", "_load_from_bytes"),
    ("collections", "OrderedDict"),
}  # fmt: skip


class Server:
    """The three endpoints, with the session that SGLang asks for."""

    def __init__(self, refuses: str = ""):
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refuses, self.is_open = refuses, False

    def post(self, url: str, *, json: Any) -> Any:
        self.calls.append((url, json))
        ok = url != self.refuses
        if url == "/begin_weight_update":
            self.is_open = ok
        elif url == "/end_weight_update":
            self.is_open = False
        elif not self.is_open:
            ok = False
        body = {"success": ok, "message": "no room"}
        return SimpleNamespace(status_code=200 if ok else 400, json=lambda: body)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


class Strict(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in ALLOWED
        return super().find_class(module, name)


def test_only_the_draft_is_loaded_and_no_prefix_is_dropped(folder: Path) -> None:
    server = Server()
    push(server, folder, "7", ranks=2)
    begin, update, end = server.calls
    assert begin == ("/begin_weight_update", {"selector": "draft"})
    assert end == ("/end_weight_update", {}) and update[0] == "/update_weights_from_tensor"
    body = update[1]
    assert body["selector"] == "draft" and body["flush_cache"] is False
    assert body["weight_version"] == "7" and len(body["serialized_named_tensors"]) == 2
    sent = Strict(io.BytesIO(base64.b64decode(body["serialized_named_tensors"][1]))).load()
    assert [name for name, _ in sent] == sorted(TENSORS)
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in sent)


@pytest.mark.parametrize("refuses", ["/begin_weight_update", "/update_weights_from_tensor"])
def test_a_refusal_leaves_no_session_open(folder: Path, refuses: str) -> None:
    server = Server(refuses)
    with pytest.raises(Refused, match=f"{refuses}: no room"):
        push(server, folder, "7")
    assert not server.is_open


class Store:
    def __init__(self, folder: Path):
        self.folder, self.current, self.torn = folder, 1, {3}

    def wanted(self, engine: str) -> int:
        return self.current

    def fetch(self, version: int, layout: str) -> Path:
        assert layout == "sglang"
        if version in self.torn:
            raise StoreError(f"version {version} is torn")
        return self.folder


def test_the_follower_pushes_what_the_store_wants(folder: Path) -> None:
    server, store = Server(), Store(folder)
    follower = Follower(server, store, "e")  # type: ignore[arg-type]
    assert follower.once() and not follower.once() and follower.version == 1
    store.current = 3
    assert not follower.once() and follower.refused == {3: "version 3 is torn"}
    assert len(server.calls) == 3 and follower.version == 1
    server.refuses, store.current = "/update_weights_from_tensor", 4
    assert not follower.once() and "no room" in follower.refused[4]
    assert follower.version is None
    # The draft may hold weights of both: the version before is pushed again.
    server.refuses = ""
    assert follower.once() and follower.version == 1 and not follower.once()
    assert server.calls[-2][1]["weight_version"] == "1"
