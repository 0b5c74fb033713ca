"""`draftsmith fleet status` and `draftsmith fleet page`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from draftsmith import files
from draftsmith.fleet.config import FleetConfig
from draftsmith.fleet.rollout.page import html
from draftsmith.fleet.rollout.table import lines
from draftsmith.fleet.rollout.view import View, view_of
from draftsmith.fleet.store.errors import StoreUnreachable
from draftsmith.fleet.store.store import VersionStore

CLEAR = "\x1b[H\x1b[2J"


def status(config: FleetConfig) -> int:
    clear = CLEAR if config.watch and sys.stdout.isatty() and not config.json else ""

    def show(view: View) -> None:
        shown = json.dumps(files.plain(view)) if config.json else "\n".join(lines(view))
        print(clear + shown, flush=True)

    return look(config, show)


def page(config: FleetConfig) -> int:
    every_s = config.every_s if config.watch else None

    def show(view: View) -> None:
        files.write_text(config.out, html(view, every_s=every_s))

    look(config, show)
    print(f"wrote {config.out}")
    return 0


def look(config: FleetConfig, show: Callable[[View], None]) -> int:
    """Shows a fleet once, or every `every_s` until interrupted. A store that is away for a moment
    ends only the first look."""
    store = VersionStore(config.versions)
    show(view_of(store))
    while config.watch:
        time.sleep(config.every_s)
        try:
            show(view_of(store))
        except StoreUnreachable as error:
            print(f"fleet: {error}", file=sys.stderr, flush=True)
    return 0
