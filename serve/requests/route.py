"""Route of a request: the draft chosen for it. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

LIVE = ""
CANARY = "canary"


def class_draft(name: str) -> str:
    # No class can take the name of another draft.
    return f"pool/{name}"


def shown(draft: str) -> str:
    """The name of a draft in logs and metrics."""
    return draft or "live"


class Route(NamedTuple):
    draft: str = LIVE
    pool_class: str = ""  # the class of the pool it was sorted into; "" for none


UNROUTED = Route()
