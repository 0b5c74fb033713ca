"""`draftsmith fleet`: versions of many engines, shown, changed by hand and published."""

from __future__ import annotations

import importlib

from draftsmith.config import check_limits
from draftsmith.errors import UserError
from draftsmith.fleet.config import FleetConfig
from draftsmith.fleet.store.layout import StoreError
from draftsmith.progress import say_loading

# Loaded with its action: publishing needs what showing does not.
RUNS = {
    "status": "draftsmith.fleet.store.show:status",
    "promote": "draftsmith.fleet.store.show:promote",
    "rollback": "draftsmith.fleet.store.show:rollback",
    "publish": "draftsmith.fleet.store.publish:run",
}


def run(config: FleetConfig) -> int:
    check_limits(config)
    if config.action == "publish":
        say_loading()
    module, _, name = RUNS[config.action].partition(":")
    try:
        return int(getattr(importlib.import_module(module), name)(config) or 0)
    except StoreError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"fleet {config.action} ends: {error}; mend that and try again") from error
