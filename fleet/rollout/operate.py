"""`draftsmith fleet promote` and `draftsmith fleet rollback`: choices by hand. Each is one put of
`current`, or of `rollout.json`, that engines follow at their next poll."""

from __future__ import annotations

import dataclasses
import time

from draftsmith.errors import UserError
from draftsmith.fleet.config import FleetConfig
from draftsmith.fleet.store.rollout import Rollout
from draftsmith.fleet.store.store import VersionStore

KEPT_DECISIONS = 50


def promote(config: FleetConfig) -> int:
    """Makes a version live on all engines; by default the candidate of the rollout."""
    store = VersionStore(config.versions)
    rollout = running(store)
    version = config.version
    if version is None and rollout is not None:
        version = rollout.candidate
    if version is None:
        raise UserError(f"no rollout is on; give the --version to promote, one of {listed(store)}")
    make_live(store, version, "promoted by hand", about=version)
    print(f"version {version} is live for all engines")
    return 0


def rollback(config: FleetConfig) -> int:
    """Ends the rollout, which leaves the live version to all engines; without one the live
    version's parent, or the given version, becomes live."""
    store = VersionStore(config.versions)
    rollout, live = running(store), store.current()
    if rollout is not None and config.version is None:
        end(store, rollout, "rolled back by hand")
        print(f"version {rollout.candidate} is withdrawn; version {live} is live for all engines")
        return 0
    version = config.version if config.version is not None else parent_of(store, live)
    make_live(store, version, "rolled back by hand", about=live)
    print(f"version {version} is live for all engines instead of {live}")
    return 0


def parent_of(store: VersionStore, live: int | None) -> int:
    if live is None:
        raise UserError(f"{store.url!r} has no live version; give --version to fleet promote")
    parent = store.manifest(live).get("parent")
    if parent is None:
        raise UserError(
            f"version {live} has no parent to go back to; give the --version, one of "
            f"{listed(store)}"
        )
    return int(parent)


def running(store: VersionStore) -> Rollout | None:
    """The rollout that engines follow now."""
    rollout = store.rollout_or_none()
    is_on = rollout is not None and not rollout.is_over and rollout.live == store.current_or_none()
    return rollout if is_on else None


def make_live(store: VersionStore, version: int, decision: str, *, about: int | None) -> None:
    """One put of `current` ends a rollout; then the decision is logged."""
    rollout, live = store.rollout_or_none(), store.current_or_none()
    store.put_current(version)
    if rollout is None:
        rollout = Rollout(
            candidate=version, live=version if live is None else live, cut=0.0, stages=(1.0,)
        )
    reason = f"version {version} is live instead of {live}"
    end(store, rollout, decision, about=about, reason=reason)


def end(
    store: VersionStore,
    rollout: Rollout,
    decision: str,
    *,
    about: int | None = None,
    reason: str = "",
) -> None:
    """Ends a rollout, with a decision about its candidate or another version."""
    over = dataclasses.replace(rollout, is_over=True)
    store.put_rollout(decided(over, decision, about=about, reason=reason))


def decided(
    rollout: Rollout, decision: str, *, about: int | None = None, reason: str = ""
) -> Rollout:
    """`rollout` with a decision more, and the oldest forgotten."""
    entry = {
        "time_s": time.time(),
        "decision": decision,
        "version": rollout.candidate if about is None else about,
        "stage": rollout.stages[rollout.stage],
        "reason": reason,
    }
    return dataclasses.replace(rollout, decisions=(*rollout.decisions, entry)[-KEPT_DECISIONS:])


def listed(store: VersionStore) -> str:
    return ", ".join(map(str, store.versions())) or "none"
