"""Versions pushed into a running SGLang by its own weight updates, in the draft alone.

SGLang's defaults would load a draft into the target as well and drop every cached prefix: both are
named in each call. A version that the store cannot verify is never sent.

`python -m draftsmith.fleet.sglang.push http://ENGINE VERSIONS [ENGINE_NAME]` follows a store.
"""

from __future__ import annotations

import base64
import pickle
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from draftsmith.fleet.log import logger
from draftsmith.fleet.names import engine_name
from draftsmith.fleet.store.errors import StoreError, StoreUnreachable
from draftsmith.fleet.store.pace import Pace
from draftsmith.fleet.store.store import VersionStore

LAYOUT = "sglang"
TIMEOUT_S = 300.0


class Refused(Exception):
    """SGLang did not take a version; its own words."""


class Poster(Protocol):
    """An HTTP client's `post`, of httpx or requests."""

    def post(self, url: str, *, json: Any) -> Any: ...


def push(http: Poster, folder: Path, version: str, *, ranks: int = 1) -> float:
    """Loads the exported draft in `folder`; returns the seconds that the session was open.

    Raises:
        Refused: a call failed. The draft may hold weights of both versions: push another.
    """
    from safetensors.torch import load_file

    tensors = sorted(load_file(folder / "model.safetensors").items())
    # What SGLang reads: a pickled list of names and tensors, of which it allows tensors alone.
    payload = base64.b64encode(pickle.dumps(tensors)).decode()
    body = {
        "serialized_named_tensors": [payload] * ranks,
        "selector": "draft",
        "flush_cache": False,
        "weight_version": version,
    }
    begun_s = time.monotonic()
    _post(http, "/begin_weight_update", {"selector": "draft"})
    try:
        _post(http, "/update_weights_from_tensor", body)
    finally:
        # A session left open would refuse every later one.
        _post(http, "/end_weight_update", {})
    return time.monotonic() - begun_s


def _post(http: Poster, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    try:
        said = answer.json()
    except ValueError:
        said = {}
    if answer.status_code != 200 or not said.get("success", False):
        reason = said.get("message") or f"status {answer.status_code}"
        raise Refused(f"{path}: {reason}")


class Follower:
    """Keeps one engine on the version that the store gives it. Refused versions are not tried
    again; after a push that failed half-way the one before is pushed, since the draft may hold
    weights of both."""

    def __init__(self, http: Poster, store: VersionStore, engine: str, *, ranks: int = 1):
        self.http, self.store, self.engine, self.ranks = http, store, engine, ranks
        self.version: int | None = None  # None where it is not certain
        self.good: int | None = None  # that the engine took last
        self.refused: dict[int, str] = {}

    def once(self) -> bool:
        """One look; True where a version was pushed. Raises `StoreUnreachable`."""
        wanted = self.store.wanted(self.engine)
        goal = self.good if wanted in self.refused else wanted
        if goal is None or goal == self.version or goal in self.refused:
            return False
        try:
            folder = self.store.fetch(goal, LAYOUT)
        except StoreUnreachable:
            raise
        except StoreError as error:
            self._refuse(goal, error)
            return False
        self.version = None
        try:
            pause_s = push(self.http, folder, str(goal), ranks=self.ranks)
        except Refused as error:
            self._refuse(goal, error)
            return False
        self.version = self.good = goal
        logger.info("draftsmith: serves version %s after %.3f s", goal, pause_s)
        return True

    def _refuse(self, version: int, error: Exception) -> None:
        self.refused[version] = str(error)
        logger.warning("draftsmith: version %s is refused (%s)", version, error)


def main(arguments: list[str]) -> int:
    import httpx

    if len(arguments) not in (2, 3):
        print(__doc__)
        return 2
    url, versions = arguments[:2]
    name = engine_name(arguments[2] if len(arguments) == 3 else "", httpx.URL(url).port or 80)
    pace = Pace(name, 5.0)
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        follower = Follower(http, VersionStore(versions), name)
        while True:
            failed = False
            try:
                follower.once()
            except (StoreUnreachable, httpx.HTTPError) as error:
                failed = True
                logger.warning("draftsmith: versions are not followed: %s", error)
            time.sleep(pace.next_poll_s(failed=failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
