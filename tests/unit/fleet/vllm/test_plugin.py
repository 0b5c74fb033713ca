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
from draftsmith.fleet.vllm.worker import WorkerState

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
        "rank": 1, "replica": 0, "version": "3"
    }  # fmt: skip


def speculating(method: str = "eagle3", drawn: str = "probabilistic", *, v2: bool = True) -> Any:
    """A configuration with the plugin's settings."""
    speculative = SimpleNamespace(method=method, draft_sample_method=drawn)
    return SimpleNamespace(
        additional_config={"draftsmith": {}}, speculative_config=speculative, use_v2_model_runner=v2
    )


def installed(monkeypatch: pytest.MonkeyPatch, version: str, *, cpu: bool = False) -> ModuleType:
    """What the plugin reads of a release beside the worker class; returns its noise's module."""
    values: dict[str, dict[str, Any]] = {
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)},
        "vllm.triton_utils": {"HAS_TRITON": not cpu},
        "vllm.v1.worker.gpu.sample.gumbel": {"gumbel_sample": lambda logits, seed, pos: None},
    }
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version, raising=False)
    for name, attributes in values.items():
        parts = name.split(".")
        for depth in range(2, len(parts) + 1):
            inner = ".".join(parts[:depth])
            if inner not in sys.modules:
                monkeypatch.setitem(sys.modules, inner, ModuleType(inner))
        vars(sys.modules[name]).update(attributes)
    return sys.modules["vllm.v1.worker.gpu.sample.gumbel"]


@pytest.mark.parametrize(
    ("version", "config", "warned"),
    [
        ("0.28.0", speculating(), "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("0.26.1rc2.dev3+g1a2b3c", speculating("mtp"), "draft_sample_method at greedy"),
        ("0.27.0", speculating("dspark"), "take 0.29 or later or leave"),
        ("0.28.0", speculating(v2=False), ""),
        ("0.28.0", speculating(drawn="greedy"), ""),
        ("0.29.0", speculating(), ""),
        ("0.33.0", speculating(), ""),
        ("1.28.0", speculating(), ""),
        ("dev", speculating(), ""),
        ("0.28.0", SimpleNamespace(additional_config={"draftsmith": {}}), ""),
    ],
)
def test_an_engine_whose_drafts_and_replacements_share_noise_is_named_once(
    worker_class: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    version: str, config: Any, warned: str,
) -> None:  # fmt: skip
    installed(monkeypatch, version)
    plugin.register()
    for rank in range(2):
        worker_class(config, rank)
    said = [one.message for one in caplog.records if "#54282" in one.message]
    assert len(said) == bool(warned) and all(warned in one and version in one for one in said)


def test_an_engine_mended_by_hand_is_not_named(
    worker_class: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    noise = installed(monkeypatch, "0.28.0")
    noise.gumbel_sample = lambda logits, seed, pos, is_drafting: None  # type: ignore[attr-defined]
    plugin.register()
    worker_class(speculating(), 0)
    assert "#54282" not in caplog.text


@pytest.mark.parametrize(
    ("version", "cpu", "mended", "warned"),
    [
        ("0.32.0", True, False, True), ("0.32.0", True, True, False), ("0.32.0", False, False, False),
        ("0.34.0", True, False, False),
    ],
)  # fmt: skip
def test_sampled_speculation_on_a_cpu_is_named_unless_its_kernel_is_mended(
    worker_class: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    version: str, cpu: bool, mended: bool, warned: bool,
) -> None:  # fmt: skip
    installed(monkeypatch, version, cpu=cpu)
    plugin.register()
    config = speculating("ngram", "greedy", v2=False)
    config.additional_config["draftsmith"]["mend_expand_kernel"] = mended
    worker_class(config, 0)
    assert ("#55005" in caplog.text and "mend_expand_kernel" in caplog.text) == warned


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
    # The package itself loads version, train and distill; the rest is settings, lines that are printed, the ring to
    # the writer, distributions as records hold them, and a table of releases.
    folders = ["train", "train.export"]
    sampling = [f"kernels.sampling{part}" for part in ("", ".logged", ".top_tokens")]
    kernels = ["kernels", "kernels.dispatch", "kernels.host_compiler", *sampling]
    settings = ["config", "errors", "files"]
    faults = f"{folders[-1]}.vllm_faults"
    base = [
        "child_process",
        *settings[:1],
        "distill",
        *settings[1:],
        *kernels,
        "progress",
        "record",
        "shared_ring",
        *folders,
        faults,
        "version",
    ]
    assert done.stdout.splitlines() == [str([f"draftsmith.{name}" for name in base]), "[]"]
