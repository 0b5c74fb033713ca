"""Newest live draft version for an engine that follows nothing by itself, given between rollouts.

`draftsmith serve --versions` and the plugin's `versions` setting follow by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from draftsmith.drafters.published import versions
from draftsmith.errors import UserError
from draftsmith.fleet.log import once
from draftsmith.fleet.store.errors import StoreError
from draftsmith.fleet.store.store import VersionStore

# Called with a version and its verified folder; False where the engine did not take it.
Serve = Callable[[int, Path], object]


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
