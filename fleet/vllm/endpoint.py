"""Routes below `/draftsmith`, and the follower, in vLLM's API server.

vLLM's `--api-key` guards paths below `/v1` only. So the routes that change something exist only
where the settings say `admin`, and answer only to this machine: a proxy or a browser between is
seen in its headers.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException
from starlette.requests import Request

from draftsmith.errors import UserError
from draftsmith.fleet.engine import engine_name, once
from draftsmith.fleet.store.layout import EngineStatus
from draftsmith.fleet.store.store import VersionStore
from draftsmith.fleet.vllm.follower import Figures, StoreFollower, figures_of, tokens_of
from draftsmith.fleet.vllm.swap_client import Answers, SwapClient
from draftsmith.fleet.vllm.worker import Settings, answers_folder, settings_of
from draftsmith.lock import folder_lock

LOCAL = frozenset({"127.0.0.1", "::1"})
# Method of the workers: version, refusals, and figures of the recorder where there is one.
STATUS = "draftsmith_status"
FOREIGN_HEADERS = ("origin", "forwarded", "x-forwarded-for", "x-real-ip")
GAUGES = {
    "version": "version of the draft that is served",
    "alpha": "accepted of the drafted tokens reached, of the served version",
    "tau": "tokens per round, of the served version",
    "z": "z of the losslessness monitor, of the served version",
    "alarm": "1 where the losslessness monitor has enough evidence against the served version",
    "swap_pause_ms": "pause of the engine by the last swap",
    "refused_versions": "versions that this engine does not serve",
}


class Beside:
    """Follower, figures and gauges of one engine in one API server."""

    def __init__(self, engine_client: Any, settings: Settings, port: int):
        self.engine_client, self.settings = engine_client, settings
        self.engine = engine_name(settings.engine, port)
        self.client = SwapClient(engine_client, settings.cache)
        self.figures: Figures = {}
        self.tokens = (0, time.time())
        self.follower: StoreFollower | None = None
        self.gauges = Gauges(self.engine)
        self.tasks: list[asyncio.Task[None]] = []
        self.held = ExitStack()

    async def start(self) -> None:
        """Prepare the workers; follow where there is something to follow. Nothing is raised: the
        engine serves what it was started with."""
        try:
            if not (self.settings.versions or self.settings.admin):
                return
            if reason := await self.client.prepare():
                once(f"drafts are not swapped: {reason}")
                return
            if self.settings.versions:
                self.tasks.append(asyncio.get_running_loop().create_task(self._follow()))
        except Exception as error:
            once(f"drafts are not swapped: {error}")

    async def _follow(self) -> None:
        settings = self.settings
        while not self.takes(answers_folder(settings.cache).parent):
            await asyncio.sleep(settings.poll_s)
        cache = Path(settings.cache) / self.engine if settings.cache else None
        self.follower = StoreFollower(
            self.client,
            VersionStore(settings.versions, cache=cache),
            self.engine,
            poll_s=settings.poll_s,
            figures=lambda: self.figures,
            floor_drop=settings.floor_drop,
            floor_rounds=settings.floor_rounds,
        )
        self.tasks.append(asyncio.get_running_loop().create_task(self._read_figures()))
        await self.follower.run()

    def takes(self, folder: Path) -> bool:
        """Takes the engine's lock until this process ends. False while another API server of the
        engine follows, or the folder is out of reach."""
        try:
            self.held.enter_context(folder_lock(folder, self.engine, option="cache"))
        except UserError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                once(f"versions are not followed yet: {error}")
            return False
        return True

    async def _read_figures(self) -> None:
        """Figures of the writer of records, which the workers read without waiting."""
        while True:
            await asyncio.sleep(self.settings.poll_s)
            try:
                workers = await self.client.ask(STATUS)
            except Exception as error:
                once(f"figures of versions are not read: {error}")
                continue
            self._take(workers)

    def _take(self, workers: Answers) -> None:
        self.figures = figures_of(workers)
        tokens, now_s = tokens_of(workers), time.time()
        if self.follower is not None:
            before, before_s = self.tokens
            self.follower.tokens_per_s = (tokens - before) / max(1e-3, now_s - before_s)
            self.gauges.set(self.follower.status())
        self.tokens = (tokens, now_s)

    async def status(self) -> dict[str, Any]:
        workers = [dict(one) for one in await self.client.call("status")]
        for worker, own in zip(workers, await self.client.ask(STATUS)):
            worker |= {name: own.get(name) for name in ("replica", "records")}
        follower = self.follower
        return {
            "engine": self.engine,
            "workers": workers,
            "figures": self.figures,
            "version": follower.version if follower is not None else None,
            "refused": follower.refused if follower is not None else {},
            "problem": follower.problem if follower is not None else "",
        }

    async def swap(self, folder: str, version: str) -> dict[str, Any]:
        outcome = await self.client.swap(Path(folder), version)
        return {"ok": outcome.ok, "reason": outcome.reason, "pause_ms": outcome.pause_ms}


class Endpoints:
    """Endpoint plugin of vLLM. Without settings it adds routes that answer 404, and starts
    nothing."""

    name = "draftsmith"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        router = APIRouter(prefix="/draftsmith")

        def beside(request: Request, *, admin: bool = False) -> Beside:
            found: Beside | None = getattr(request.app.state, "draftsmith", None)
            if found is None or (admin and not found.settings.admin):
                raise HTTPException(404, "draftsmith has no such route with these settings")
            if admin and not is_local(request):
                raise HTTPException(403, "this route answers to its own machine only")
            return found

        @router.get("/status")
        async def status(request: Request) -> dict[str, Any]:
            return await beside(request).status()

        @router.post("/swap")
        async def swap(request: Request) -> dict[str, Any]:
            here, body = beside(request, admin=True), await body_of(request)
            folder, version = body.get("folder"), body.get("version")
            if not isinstance(folder, str) or not isinstance(version, str | int):
                raise HTTPException(422, 'give {"folder": path, "version": name}')
            found = await here.swap(folder, str(version))
            if not found["ok"]:
                raise HTTPException(409, found["reason"])
            return found

        @router.post("/reset-prefix")
        async def reset_prefix(request: Request) -> dict[str, Any]:
            here = beside(request, admin=True)
            done = await here.engine_client.reset_prefix_cache()
            return {"reset": done is not False}

        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Start what runs beside the engine."""
        settings = settings_of(engine_client.vllm_config) if engine_client is not None else None
        if settings is None:
            return
        state.draftsmith = Beside(engine_client, settings, int(getattr(args, "port", 0) or 0))
        await state.draftsmith.start()


async def body_of(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def is_local(request: Request) -> bool:
    """True for a client on this machine itself, with no proxy and no browser between."""
    host = request.client.host if request.client is not None else ""
    return host in LOCAL and not any(name in request.headers for name in FOREIGN_HEADERS)


class Gauges:
    """Nothing where the Prometheus client is missing or refuses."""

    def __init__(self, engine: str):
        self.engine = engine
        self.gauges: dict[str, Any] = {}
        try:
            from prometheus_client import Gauge

            self.gauges = {
                name: Gauge(
                    f"draftsmith_draft_{name}",
                    help_text,
                    ["engine"],
                    multiprocess_mode="mostrecent",
                )
                for name, help_text in GAUGES.items()
            }
        except (ImportError, ValueError) as error:
            once(f"no gauges of the draft: {error}")

    def set(self, status: EngineStatus) -> None:
        pause_ms, refused = status.last_swap.get("pause_ms"), len(status.refused)
        values = vars(status) | {"swap_pause_ms": pause_ms, "refused_versions": refused}
        for name, gauge in self.gauges.items():
            value = values[name]
            if value is not None:
                gauge.labels(self.engine).set(value)
