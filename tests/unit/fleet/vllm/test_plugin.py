"""The plugin beside a stand-in of vLLM's worker class: what it adds, and that an engine without
settings stays as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from draftsmith.fleet.vllm import plugin
from draftsmith.fleet.vllm.state import WorkerState

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def worker_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """The base class of workers, as vLLM's module gives it."""

    class WorkerBase:
        def __init__(self, vllm_config: Any, rank: int) -> None:
            self.vllm_config, self.rank = vllm_config, rank

    module = ModuleType("vllm.v1.worker.worker_base")
    module.WorkerBase = WorkerBase  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return WorkerBase


def test_a_worker_has_a_state_only_where_settings_are(worker_class: type) -> None:
    plugin.register()
    plugin.register()
    plain = worker_class(SimpleNamespace(additional_config={}), 0)
    assert vars(plain).keys() == {"vllm_config", "rank"} and plain.draftsmith_status() == {}
    set_up = worker_class(SimpleNamespace(additional_config={"draftsmith": {"version": "3"}}), 1)
    assert isinstance(set_up.draftsmith, WorkerState)
    assert set_up.draftsmith_status() == {
        "rank": 1, "replica": 0, "version": "3", "refused": {}
    }  # fmt: skip


def test_no_error_of_the_plugin_reaches_the_engine(
    worker_class: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(plugin, "settings_of", fail)
    plugin.register()
    assert worker_class(SimpleNamespace(), 0).rank == 0


def test_an_engine_without_the_worker_class_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register()


def test_entry_points_name_the_plugin() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for group, name in (("general_plugins", "register"), ("endpoint_plugins", "endpoints")):
        section = text.partition(f'[project.entry-points."vllm.{group}"]\n')[2].partition("\n[")[0]
        assert re.findall(r'^draftsmith = "(.*)"', section) == [f"{plugin.__name__}:{name}"]
        assert callable(getattr(plugin, name))
    made = plugin.endpoints()
    assert made.name == "draftsmith" and made.required_tasks == ("generate",)


def test_the_plugin_imports_neither_transformers_nor_the_rest_of_draftsmith() -> None:
    script = """
import sys
import draftsmith.fleet.vllm.plugin
from pathlib import Path
ours = [name for name in sys.modules if name.startswith("draftsmith.")]
print(sorted(name for name in ours if not name.startswith("draftsmith.fleet")))
print([name for name in ("transformers", "pyarrow", "fsspec", "vllm") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    # The package itself loads links and version; the rest is the ring to the writer, numpy alone.
    parts = ["", ".arrays", ".child", ".ring"]
    base = ["links", *(f"shared_memory{part}" for part in parts), "version"]
    assert done.stdout.splitlines() == [str([f"draftsmith.{name}" for name in base]), "[]"]
