"""`draftsmith fleet publish`: the learner's versions in a store, at once or in stages, until it is
stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from draftsmith.drafters import versions
from draftsmith.errors import UserError
from draftsmith.fleet.config import FleetConfig
from draftsmith.fleet.rollout.controller import Controller, ServedTexts
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
        root,
        config.layouts,
        target=config.target,
        trust_remote_code=config.trust_remote_code,
    )
    store = VersionStore(config.to)
    controller = controller_of(store, root, config)
    mirror = Mirror(
        root,
        store,
        writer,
        promote=controller.offer if controller else None,
        keep=config.keep,
        event=say,
    )
    steps = [mirror.step, *([controller.step] if controller else [])]
    with stopping(stop):
        await_learner(root, config, stop)
        if not stop.is_set():
            with folder_lock(root, "publisher", option="versions"):
                loop(steps, config, stop)
    if config.once and mirror.damage:
        raise UserError(mirror.damage)
    return 0


def await_learner(root: Path, config: FleetConfig, stop: threading.Event) -> None:
    """A learner that was started with the publisher makes its folder when it has loaded."""
    if not root.is_dir():
        say(f"waiting for versions folder {config.versions!r}, which draftsmith distill makes")
    while not root.is_dir() and not stop.wait(config.poll_s):
        pass


def controller_of(store: VersionStore, root: Path, config: FleetConfig) -> Controller | None:
    """None without stages: every live version is for all engines at once."""
    if not config.stages:
        if config.buffer is not None:
            raise UserError(
                "--buffer serves to decide stages; give --stages too, such as 0.05 0.25"
            )
        return None
    stages = config.stages
    if list(stages) != sorted(stages) or not 0 < stages[0] <= stages[-1] <= 1:
        raise UserError(
            f"stages is {' '.join(map(str, stages))}; it must be shares above 0 and at most "
            "1, ascending"
        )

    def give_up(version: int, live: int, reason: str) -> None:
        """The learner goes on from the version that engines serve."""
        with suppress(UserError):  # damaged: the learner goes back by itself
            if versions.latest(root) == version:
                versions.rollback(root, live, f"withdrawn from the engines: {reason}")

    return Controller(
        store,
        stages,
        config.rollout,
        texts=ServedTexts(config.buffer) if config.buffer else None,
        give_up=give_up,
        event=say,
    )


def loop(steps: Sequence[Callable[[], object]], config: FleetConfig, stop: threading.Event) -> None:
    """Steps until `stop`. An error that a later step may get over is reported once in a row."""
    failure = ""
    while not stop.is_set():
        try:
            for step in steps:
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
