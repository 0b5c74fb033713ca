"""`draftsmith fleet publish`: the learner's versions in a store, until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.fleet.config import FleetConfig
from draftsmith.fleet.store.layout import StoreError
from draftsmith.fleet.store.mirror import Damaged, LayoutWriter, Mirror
from draftsmith.fleet.store.store import VersionStore
from draftsmith.lock import folder_lock, stopping


def run(config: FleetConfig, stop: threading.Event | None = None) -> int:
    if config.to is None:
        raise UserError("fleet publish needs the address that engines read; give --to")
    root, stop = Path(config.versions), stop or threading.Event()
    if config.once and not root.is_dir():
        raise UserError(
            f"versions folder {config.versions!r} does not exist; start draftsmith distill first"
        )
    writer = LayoutWriter(
        root, config.layouts, target=config.target, trust_remote_code=config.trust_remote_code
    )
    mirror = Mirror(root, VersionStore(config.to), writer, keep=config.keep, event=say)
    with stopping(stop):
        await_learner(root, config, stop)
        if not stop.is_set():
            with folder_lock(root, "publisher", option="versions"):
                loop(mirror.step, config, stop)
    if config.once and mirror.damage:
        raise UserError(mirror.damage)
    return 0


def await_learner(root: Path, config: FleetConfig, stop: threading.Event) -> None:
    """A learner that was started with the publisher makes its folder when it has loaded."""
    if not root.is_dir():
        say(f"waiting for versions folder {config.versions!r}, which draftsmith distill makes")
    while not root.is_dir() and not stop.wait(config.poll_s):
        pass


def loop(step: Callable[[], object], config: FleetConfig, stop: threading.Event) -> None:
    """Steps until `stop`. An error that a later step may get over is reported once in a row."""
    failure = ""
    while not stop.is_set():
        try:
            step()
            failure = ""
        except (StoreError, OSError, Damaged) as error:
            if config.once:
                raise
            if str(error) != failure:
                failure = str(error)
                say(f"{failure}; trying again")
        if config.once:
            return
        stop.wait(config.poll_s)


def say(text: str) -> None:
    print(f"fleet: {text}", flush=True)
