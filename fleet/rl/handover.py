"""Names of the weights, and the newest live draft version, for an engine that rolls out,
between rollouts.

`draftsmith serve --versions` and the plugin's `versions` setting follow by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.drafters.published import versions
from draftsmith.errors import UserError
from draftsmith.fleet.engine import once
from draftsmith.fleet.store.layout import StoreError
from draftsmith.fleet.store.store import VersionStore

# Called with a version and its verified folder; False where the engine did not take it.
Serve = Callable[[int, Path], object]
TIMEOUT_S = 60.0


class Handover:
    """`latest` is the live version, None before the first; `open_version` its folder."""

    def __init__(
        self,
        latest: Callable[[], int | None],
        open_version: Callable[[int], Path],
        serve: Serve,
    ):
        self.latest, self.open_version, self.serve = latest, open_version, serve
        self.version: int | None = None  # that the engine took last

    @classmethod
    def of_learner(cls, root: str | Path, serve: Serve) -> Handover:
        """Versions of a learner's own folder, as checkpoints of draftsmith."""
        return cls(partial(versions.latest, root), partial(versions.open_version, root), serve)

    @classmethod
    def of_store(cls, url: str, serve: Serve, *, layout: str = "vllm") -> Handover:
        """Versions that `draftsmith fleet publish` puts into a store, in an engine's layout."""
        store = VersionStore(url)
        return cls(store.current, partial(store.fetch, layout=layout), serve)

    def look(self) -> bool:
        """True where the engine took another version. One that it does not take is offered again
        at the next look; nothing is raised."""
        try:
            version = self.latest()
            if version is None or version == self.version:
                return False
            if self.serve(version, self.open_version(version)) is False:
                return False
        except (UserError, StoreError, OSError) as error:
            once(f"no draft is handed over ({error})")
            return False
        self.version = version
        return True


class VllmServer:
    """Routes of one server; nothing is raised, since training goes on without them.

    TRL sends weights and gives them no name. So the name is set where no request runs: after an
    optimizer step, before TRL sends the new weights with its next rollouts.
    """

    def __init__(self, url: str, *, http: Any = None):
        self.url = url.rstrip("/")
        self._http = http

    @property
    def http(self) -> Any:
        """A client with httpx's `post`."""
        if self._http is None:
            import httpx

            self._http = httpx.Client(timeout=TIMEOUT_S)
        return self._http

    def name_weights(self, name: str) -> bool:
        """Name of the weights in records from now on. vLLM has this route in its development mode
        alone, which TRL needs too."""
        return self._post("/update_weight_version", {"new_version": name})

    def swap(self, version: int, folder: Path) -> bool:
        """Draft of an exported folder in place of the served one. The route of draftsmith's plugin,
        with `admin` in its settings, on the server's own machine."""
        return self._post("/draftsmith/swap", {"folder": str(folder), "version": str(version)})

    def _post(self, path: str, body: dict[str, Any]) -> bool:
        try:
            answer = self.http.post(f"{self.url}{path}", json=body)
        except Exception as error:  # of whichever client it is
            once(f"{self.url}{path} cannot be reached ({error})")
            return False
        if answer.status_code >= 300:
            once(f"{self.url}{path} answers {answer.status_code}: {answer.text[:200]}")
            return False
        return True
