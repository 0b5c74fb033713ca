"""Retention of a store: the newest versions, and whatever is in use, stay."""

from __future__ import annotations

import time
from pathlib import Path

from draftsmith.drafters.published import versions
from draftsmith.fleet.store.errors import StoreError, StoreUnreachable
from draftsmith.fleet.store.store import VersionStore

# Engines whose status is older are gone; until then their version stays.
GONE_S = 86400.0


def prune(store: VersionStore, root: Path, *, keep: int) -> list[int]:
    """Deletes all versions but the newest `keep`, the live one and its parent, those of a rollout
    and those that engines serve; also folders without a manifest that the learner will not fill any
    more. Returns the deleted versions.

    The caller is the only writer, and uploads nothing meanwhile.
    """
    if keep <= 0:
        return []
    present = store.versions()
    used = in_use(store)
    old = set(present[:-keep])
    torn = {
        version for version in present if version not in used and not is_whole(store, version)
    } - set(versions.versions(root))
    doomed = sorted((old | torn) - used)
    for version in doomed:
        store.delete(version)
    return doomed


def in_use(store: VersionStore) -> set[int]:
    used: set[int | None] = set()
    live, rollout = store.current(), store.rollout_or_none()
    if live is not None:
        used |= {live, store.manifest(live).get("parent")}
    if rollout is not None and not rollout.is_over:
        used |= {rollout.candidate, rollout.live}
    for engine in store.engines():
        if time.time() - engine.at_s < GONE_S:
            used.add(engine.version)
    return {version for version in used if version is not None}


def is_whole(store: VersionStore, version: int) -> bool:
    try:
        store.manifest(version)
    except StoreUnreachable:
        raise
    except StoreError:
        return False
    return True
