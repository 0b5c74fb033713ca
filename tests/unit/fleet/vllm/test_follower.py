"""Follower and swap client over stand-ins of workers: an engine ends with the version that is
meant, a refused one is not tried again, and all workers serve the same."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.fleet.store.store import VersionStore
from draftsmith.fleet.vllm.endpoint import Beside, Endpoints
from draftsmith.fleet.vllm.follower import Pace, StoreFollower
from draftsmith.fleet.vllm.swap_client import SwapClient
from draftsmith.fleet.vllm.worker import Settings, WorkerState, draftsmith_status, draftsmith_swap


class Swaps:
    """Stand-in of one worker's swaps; version 13 is one that it refuses."""

    def __init__(self, version: str = "", *, fails_at: str = ""):
        self.version, self.state, self.reason = version, "idle", ""
        self.fails_at, self.steps = fails_at, []  # type: ignore[var-annotated]
        self.before, self.asleep, self.applied, self.mismatched = version, False, False, "-"
        self.passes = False

    def status(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "reason": self.reason,
            "staged": next((one for name, one in reversed(self.steps) if name == "stage"), ""),
            "version": self.version,
            "digest": f"digest of {self.version}",
            "matches": self.version not in ("", self.mismatched),
            "asleep": self.asleep,
            "lasting": self.state == "refused" and self.version != "" and not self.passes,
            "last_swap": {"pause_ms": 0.5},
        }

    def _step(self, name: str, version: str = "") -> dict[str, Any]:
        self.steps.append((name, version))
        bad = version == "13" or self.fails_at == f"{name} {version}"
        self.state, self.reason = ("refused", "bad") if bad else ("idle", "")
        return self.status()

    def prepare(self) -> dict[str, Any]:
        return self._step("prepare")

    def stage(self, folder: str, version: str) -> dict[str, Any]:
        assert (Path(folder) / "model.safetensors").is_file()
        return self._step("stage", version)

    def trial(self, version: str) -> dict[str, Any]:
        return self._step("trial", version)

    def apply(self, version: str) -> dict[str, Any]:
        found = self._step("apply", version)
        if self.state != "refused":
            self.before, self.version = self.version, version
            self.applied = True
        return found | {"version": self.version}

    def look(self) -> dict[str, Any]:
        return self._step("look")

    def keep(self) -> dict[str, Any]:
        self.applied = False
        return self._step("keep")

    def take_back(self) -> dict[str, Any]:
        if self.applied:
            self.version, self.applied = self.before, False
        return self._step("take_back")


class Client:
    """Stand-in of vLLM's engine client over workers; several engines answer with the first alone,
    as vLLM's does."""

    def __init__(self, workers: list[Swaps], settings: Settings, *, engines: int = 1):
        self.swaps = workers
        self.parallel = SimpleNamespace(
            data_parallel_size=engines, world_size=len(workers) // engines
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=self.parallel, additional_config={"draftsmith": vars(settings)}
        )
        self.workers = [
            SimpleNamespace(
                draftsmith=WorkerState(settings, swaps=one),
                rank=index % self.parallel.world_size,
                vllm_config=SimpleNamespace(
                    # As vLLM shows it to replicas of a dense target.
                    parallel_config=SimpleNamespace(
                        data_parallel_size=1,
                        data_parallel_rank=0,
                        data_parallel_index=index // self.parallel.world_size,
                    )
                ),
            )
            for index, one in enumerate(workers)
        ]
        self.resets = 0

    async def collective_rpc(
        self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        act = {"draftsmith_swap": draftsmith_swap, "draftsmith_status": draftsmith_status}[method]
        found = [act(worker, *args, **(kwargs or {})) for worker in self.workers]
        return found[: self.parallel.world_size]

    async def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True


def publish(root: Path, version: int) -> None:
    folder = root / f"v{version:06d}"
    (folder / "vllm").mkdir(parents=True)
    files = {}
    for name in ("vllm/model.safetensors", "vllm/config.json"):
        data = f"{version} {name}".encode()
        (folder / name).write_bytes(data)
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    put_manifest(folder, version, files)
    (root / "current").write_text(f"{version}\n")


def put_manifest(folder: Path, version: int, files: dict[str, Any]) -> None:
    manifest = {"schema": 1, "version": version, "files": files, "layouts": ["vllm"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def follower_of(client: Client, tmp_path: Path, **more: Any) -> StoreFollower:
    store = VersionStore(str(tmp_path / "versions"), cache=tmp_path / "cache")
    swaps = SwapClient(client, str(tmp_path / "shared"))
    return StoreFollower(swaps, store, "engine-1", poll_s=1.0, **more)


def follow(follower: StoreFollower, root: Path, *versions: int) -> None:
    for version in versions:
        publish(root, version)
        asyncio.run(follower.once())


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    (tmp_path / "versions").mkdir()
    return tmp_path / "versions"


def test_the_wanted_version_is_served_by_all_workers(versions: Path, tmp_path: Path) -> None:
    workers = [Swaps(), Swaps()]
    follower = follower_of(Client(workers, Settings()), tmp_path)
    asyncio.run(follower.once())
    assert follower.version is None
    for version in (1, 2):
        follow(follower, versions, version)
        assert [one.version for one in workers] == [str(version)] * 2
    (status,) = follower.store.engines()
    assert (status.engine, status.version, status.refused) == ("engine-1", 2, {})
    assert status.last_swap == {"version": 2, "pause_ms": 0.5, "ok": True}
    steps = len(workers[0].steps)
    asyncio.run(follower.once())
    assert len(workers[0].steps) == steps


def test_what_is_loaded_counts_and_not_what_was_done_last(versions: Path, tmp_path: Path) -> None:
    """After a sleep, an update by others or a restart a worker says that it does not know."""
    workers = [Swaps(), Swaps()]
    follower = follower_of(Client(workers, Settings()), tmp_path)
    follow(follower, versions, 1)
    workers[1].version = ""
    asyncio.run(follower.once())
    assert workers[1].version == "1" and ("stage", "1") in workers[1].steps[-6:]


def test_a_refused_version_is_reported_and_not_tried_again(versions: Path, tmp_path: Path) -> None:
    workers = [Swaps()]
    client = Client(workers, Settings())
    follower = follower_of(client, tmp_path)
    follow(follower, versions, 12, 13)
    steps = len(workers[0].steps)
    asyncio.run(follower.once())
    assert workers[0].version == "12" and len(workers[0].steps) == steps
    (status,) = follower.store.engines()
    assert status.version == 12 and status.refused == {13: "bad"}
    follow(follower, versions, 14)
    assert workers[0].version == "14"


def test_nothing_is_swapped_while_the_engine_sleeps(versions: Path, tmp_path: Path) -> None:
    workers = [Swaps()]
    workers[0].asleep = True
    follower = follower_of(Client(workers, Settings()), tmp_path)
    follow(follower, versions, 1)
    assert workers[0].steps == [] and follower.refused == {}
    workers[0].asleep = False
    asyncio.run(follower.once())
    assert workers[0].version == "1"


def test_a_torn_file_never_reaches_a_worker(versions: Path, tmp_path: Path) -> None:
    workers = [Swaps()]
    follower = follower_of(Client(workers, Settings()), tmp_path)
    publish(versions, 1)
    (versions / "v000001" / "vllm" / "model.safetensors").write_bytes(b"torn")
    asyncio.run(follower.once())
    assert workers[0].steps == [] and 1 in follower.refused


@pytest.mark.parametrize("step", ["stage 2", "trial 2", "apply 2"])
def test_one_worker_that_refuses_keeps_the_others_back(
    versions: Path, tmp_path: Path, step: str
) -> None:
    workers = [Swaps(), Swaps(fails_at=step)]
    follower = follower_of(Client(workers, Settings()), tmp_path)
    follow(follower, versions, 1, 2)
    assert [one.version for one in workers] == ["1", "1"] and 2 in follower.refused


def test_a_refusal_of_the_moment_is_tried_again(versions: Path, tmp_path: Path) -> None:
    worker = Swaps(fails_at="stage 2")
    follower = follower_of(Client([worker], Settings()), tmp_path)
    worker.passes = True
    follow(follower, versions, 1, 2)
    assert follower.refused == {} and worker.version == "1"
    worker.fails_at = ""
    asyncio.run(follower.once())
    assert worker.version == "2"
    publish(versions, 13)
    for _ in range(3):
        asyncio.run(follower.once())
    assert 13 in follower.refused


def test_a_rank_with_other_weights_takes_all_back(versions: Path, tmp_path: Path) -> None:
    workers = [Swaps(), Swaps()]
    follower = follower_of(Client(workers, Settings()), tmp_path)
    follow(follower, versions, 1)
    workers[1].mismatched = "2"
    publish(versions, 2)
    for _ in range(3):
        asyncio.run(follower.once())
        assert [one.version for one in workers] == ["1", "1"]
    assert "not what was staged" in follower.refused[2]


def test_engines_behind_one_server_answer_by_files(versions: Path, tmp_path: Path) -> None:
    """vLLM returns the first engine's answers alone."""
    settings = Settings(cache=str(tmp_path / "shared"))
    workers = [Swaps(), Swaps(), Swaps(fails_at="stage 2"), Swaps()]
    follower = follower_of(Client(workers, settings, engines=2), tmp_path)
    follow(follower, versions, 1)
    assert [one.version for one in workers] == ["1"] * 4
    follow(follower, versions, 2)
    assert [one.version for one in workers] == ["1"] * 4 and follower.refused == {2: "bad"}
    assert not list((tmp_path / "shared" / "answers").iterdir())


def test_behind_another_load_balancer_a_server_has_its_own_engines(
    versions: Path, tmp_path: Path
) -> None:
    workers = [Swaps()]
    client = Client(workers, Settings(cache=str(tmp_path / "shared")))
    client.parallel.data_parallel_size, client.parallel.local_engines_only = 8, True
    client.parallel.data_parallel_size_local = 1
    follower = follower_of(client, tmp_path)
    follow(follower, versions, 1)
    assert follower.version == 1


def test_figures_of_all_engines_behind_one_server_count(versions: Path, tmp_path: Path) -> None:
    settings = Settings(cache=str(tmp_path / "shared"))
    client = Client([Swaps("4"), Swaps("4")], settings, engines=2)
    for worker, accepted in zip(client.workers, (10, 30)):
        one = {"rounds": 20, "positions": 50, "accepted": accepted, "committed": 20 + accepted}
        one["alarm"] = accepted == 30
        status = {"tokens": 100, "writer": {"versions": {"4": one}}}
        worker.draftsmith.recorder = SimpleNamespace(status=lambda status=status: status)
    beside = Beside(client, settings, 8000)
    beside.follower = follower_of(client, tmp_path, figures=lambda: beside.figures)
    asyncio.run(beside.follower.once())
    beside._take(asyncio.run(beside.client.ask("draftsmith_status")))
    found = beside.follower.status()
    assert (found.alpha, found.tau, found.alarm) == (0.4, 2.0, True)
    assert beside.figures["4"]["rounds"] == 40 and beside.tokens[0] == 200
    shown = asyncio.run(beside.status())["workers"]
    assert [one["replica"] for one in shown] == [0, 1] and shown[1]["records"]["tokens"] == 100


@pytest.mark.parametrize(("alpha", "alarm"), [(0.2, 0.0), (0.6, 1.0)])
def test_an_engine_falls_back_by_itself(
    versions: Path, tmp_path: Path, alpha: float, alarm: float
) -> None:
    figures: dict[str, dict[str, float]] = {}
    workers = [Swaps()]
    follower = follower_of(
        Client(workers, Settings()), tmp_path, figures=lambda: figures, floor_rounds=100
    )
    follow(follower, versions, 1, 2)
    figures["1"] = {"rounds": 100, "positions": 1000, "accepted": 600, "alpha": 0.6}
    figures["2"] = {
        "rounds": 100, "positions": 1000, "accepted": 1000 * alpha, "alarm": alarm,
        "alpha": alpha, "z": -9.0,
    }  # fmt: skip
    asyncio.run(follower.once())
    assert workers[0].version == "1" and "back on version 1" in follower.refused[2]
    asyncio.run(follower.once())
    assert workers[0].version == "1" and follower.latest_good() == 1
    follow(follower, versions, 3)
    assert workers[0].version == "3"


def test_one_api_server_of_several_follows(tmp_path: Path) -> None:
    first, second = (
        Beside(Client([Swaps()], Settings()), Settings(engine="e"), 0) for _ in range(2)
    )
    assert first.takes(tmp_path) and not second.takes(tmp_path)
    first.held.close()
    assert second.takes(tmp_path)


def called_from(host: str, app: Any) -> Any:
    """`app` as clients at `host` reach it."""

    async def reached(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "client": (host, 1)}, receive, send)

    return reached


def test_a_cache_out_of_reach_at_the_start_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    beside = Beside(Client([Swaps()], Settings()), Settings(engine="e"), 0)
    assert not beside.takes(tmp_path / "cache")
    (tmp_path / "cache").unlink()
    assert beside.takes(tmp_path / "cache")


def test_routes_that_change_something_are_for_this_machine_alone(
    versions: Path, tmp_path: Path
) -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    publish(versions, 5)
    folder = str(versions / "v000005" / "vllm")
    for admin in (False, True):
        workers = [Swaps()]
        client = Client(workers, Settings(admin=admin, cache=str(tmp_path / "shared")))
        client.workers[0].draftsmith.recorder = SimpleNamespace(status=lambda: {"tokens": 5})
        app, plugin = FastAPI(), Endpoints()
        plugin.attach_router(app)
        assert TestClient(app).get("/draftsmith/status").status_code == 404
        asyncio.run(plugin.init_state(client, app.state, SimpleNamespace(port=8000)))
        local = TestClient(called_from("127.0.0.1", app))
        worker = local.get("/draftsmith/status").json()["workers"][0]
        assert worker["version"] == "" and worker["records"] == {"tokens": 5}
        body = {"folder": folder, "version": 5}
        if not admin:
            assert local.post("/draftsmith/swap", json=body).status_code == 404
            continue
        far = TestClient(called_from("10.0.0.7", app))
        assert far.post("/draftsmith/swap", json=body).status_code == 403
        browser = local.post("/draftsmith/swap", json=body, headers={"origin": "http://evil"})
        assert browser.status_code == 403
        assert local.post("/draftsmith/swap", json={"folder": 3}).status_code == 422
        assert local.post("/draftsmith/swap", json=body).json()["ok"]
        assert workers[0].version == "5"
        refused = local.post("/draftsmith/swap", json=body | {"version": "13"})
        assert refused.status_code == 409 and workers[0].version == "5"
        assert local.post("/draftsmith/reset-prefix").json() == {"reset": True}
        assert client.resets == 1


def test_polls_vary_and_failures_wait_longer_up_to_a_bound() -> None:
    pace = Pace("a", 10.0)
    waits = [pace.next_poll_s() for _ in range(200)]
    assert 5 <= min(waits) < 7 and 13 < max(waits) <= 15
    assert [pace.next_poll_s(failed=True) < 2**turn * 15 for turn in range(1, 4)] == [True] * 3
    assert max(pace.next_poll_s(failed=True) for _ in range(100)) <= 450
    assert pace.next_poll_s() <= 15
