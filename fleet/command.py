"""`draftsmith fleet`: versions of many engines, shown, changed by hand and published."""

from __future__ import annotations

from draftsmith.config import check_limits
from draftsmith.errors import UserError
from draftsmith.fleet.config import FleetConfig
from draftsmith.fleet.store import mirror, show
from draftsmith.fleet.store.layout import StoreError

RUNS = {
    "status": show.status,
    "promote": show.promote,
    "rollback": show.rollback,
    "publish": mirror.run,
}


def run(config: FleetConfig) -> int:
    check_limits(config)
    try:
        return RUNS[config.action](config)
    except StoreError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"fleet {config.action} ends: {error}; mend that and try again") from error
