"""Threads of a server on a device other than the first: each makes it its own before it
touches a tensor."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith.drafters.target.load import load_model
from draftsmith.errors import UserError
from draftsmith.kernels.dispatch import use_device
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.http.server import Intake
from draftsmith.serve.watch import VersionWatcher

SECOND = torch.device("cuda:1")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device]]:
    """(thread, device) of each call of torch's."""
    calls: list[tuple[str, torch.device]] = []

    def set_device(device: torch.device) -> None:
        calls.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return calls


def test_only_cuda_devices_with_a_number_are_chosen(chosen):
    for device in ("cpu", "cuda", "meta", "cuda:1", SECOND):
        use_device(device)
    assert [device for _, device in chosen] == [SECOND, SECOND]


def test_a_model_is_loaded_on_its_device(chosen, tmp_path):
    # Before anything is read: the folder is not even a model.
    with pytest.raises(UserError):
        load_model(tmp_path, trust_remote_code=False, device="cuda:1")
    assert chosen == [("MainThread", SECOND)]


def test_the_engines_thread_chooses_first(chosen):
    engine = SimpleNamespace(
        target=SimpleNamespace(device=SECOND),
        busy=False,
        scheduler=SimpleNamespace(running=[], waiting=[], busy=False),
    )
    loop = EngineLoop(engine).start()
    loop.close()
    assert chosen == [("draftsmith-engine", SECOND)]


def test_the_versions_thread_chooses_first(chosen, tmp_path: Path):
    loop = SimpleNamespace(
        engine=SimpleNamespace(
            target=SimpleNamespace(device=SECOND, revision="r"), drafts=SimpleNamespace()
        )
    )
    VersionWatcher(loop, tmp_path, poll_s=0.01).start().stop()
    assert chosen == [("draftsmith-versions", SECOND)]


def test_the_tokenizers_thread_chooses_first(chosen):
    asyncio.run(Intake(None, device=SECOND).run(lambda: None))
    ((thread, device),) = chosen
    assert thread.startswith("draftsmith-intake") and device == SECOND
